"""Published families as configurations: their shapes, without a checkpoint.

What a converted folder of the published files has, to plan with. The length of Tar's
vocabulary and the width of TA-Tok's codes are not published but in the files, and are
near to these.
"""

from collections.abc import Callable

from jaxspec.checkpoints.configs import LLAMAGEN_SIZES
from jaxspec.models.chameleon import ChameleonConfig, ChameleonGridConfig
from jaxspec.models.qwen2 import Qwen2Config
from jaxspec.models.t5 import T5Config
from jaxspec.models.ta_tok import TaTokConfig, TowerConfig
from jaxspec.models.transformer import TransformerConfig, swiglu_hidden
from jaxspec.models.vq import VQConfig
from jaxspec.pipeline import Defaults, PipelineConfig
from jaxspec.reading import Reader
from jaxspec.reading.llamagen import CaptionReader, ClassReader
from jaxspec.reading.lumina import NEWLINE, AnoleReader, LuminaReader
from jaxspec.reading.tar import TarReader, Writer

NO_TOKENIZER = "{}"  # a preset reads no prompt
VQ_16 = VQConfig()
FLAN_T5_XL = T5Config(
    vocab_size=32128, width=2048, depth=24, heads=32, head_width=64, hidden=5120
)
TA_TOK = TaTokConfig(
    image=384,
    codebook_size=65536,
    code_width=1536,
    normalize_codes=False,
    encoder=TowerConfig(
        width=1152,
        depth=26,
        heads=16,
        hidden=4304,
        channels=3,
        patch=14,
        places=27,
        final_norm=False,
    ),
    decoder=TowerConfig(
        width=1152,
        depth=3,
        heads=12,
        hidden=3072,
        channels=1536,
        patch=1,
        places=27,
        final_norm=True,
    ),
)
# Qwen2.5-Instruct with image and scale tokens, by millions of parameters.
QWEN2 = {
    "1.5b": Qwen2Config(
        vocab_size=217488,
        width=1536,
        depth=28,
        heads=12,
        key_heads=2,
        head_width=128,
        hidden=8960,
        tied=True,
    ),
    "7b": Qwen2Config(
        vocab_size=217488,
        width=3584,
        depth=28,
        heads=28,
        key_heads=4,
        head_width=128,
        hidden=18944,
        tied=False,
    ),
}


def _tar(language: str) -> PipelineConfig:
    """Tar with AR-DTok LP at its three sizes."""
    decoders = tuple(
        (size, _ar_dtok(size // VQ_16.factor)) for size in (256, 512, 1024)
    )
    return PipelineConfig(
        name=f"tar-{language}",
        decoders=decoders,
        vq=VQ_16,
        text=TarReader(TA_TOK, Writer(QWEN2[language]), NO_TOKENIZER),
        defaults=Defaults(1024, guidance=4.0, temperature=1.0, top_k=0, top_p=1.0),
        pixels="truncated",
    )


def _ar_dtok(side: int) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=VQ_16.codebook_size,
        width=1280,
        depth=30,
        heads=20,
        hidden=swiglu_hidden(1280),
        grid=(side, side),
        prefix="features",
        prefix_length=TA_TOK.indices(),
        prefix_width=TA_TOK.decoder.width,
        positions="learned",
    )


def _llamagen(width: int, captions: bool, *sizes: int) -> PipelineConfig:
    """LlamaGen of a width: by labels, or by captions through flan-t5-xl."""
    depth, heads = LLAMAGEN_SIZES[width]
    reader = ClassReader(1000)
    if captions:
        reader = CaptionReader(120, FLAN_T5_XL.width, FLAN_T5_XL, NO_TOKENIZER)

    def decoder(size: int) -> TransformerConfig:
        side = size // VQ_16.factor
        return TransformerConfig(
            vocab_size=VQ_16.codebook_size,
            width=width,
            depth=depth,
            heads=heads,
            hidden=swiglu_hidden(width),
            grid=(side, side),
            prefix="caption" if captions else "class",
            prefix_length=120 if captions else 1,
            prefix_width=FLAN_T5_XL.width if captions else 1000,
            positions="rotary",
        )

    guidance, top_k = (7.5, 1000) if captions else (4.0, 2000)
    return PipelineConfig(
        name="llamagen",
        decoders=tuple((size, decoder(size)) for size in sizes),
        vq=VQ_16,
        text=reader,
        defaults=Defaults(sizes[-1], guidance, 1.0, top_k, 1.0),
    )


CHAMELEON_7B = ChameleonConfig(
    vocab_size=65536,
    width=4096,
    depth=32,
    heads=32,
    key_heads=32,
    head_width=128,
    hidden=11008,
)
VQGAN = VQConfig(
    codebook_size=8192, code_width=256, normalize_codes=False, attention="middle"
)


def _chameleon(name: str, reader: Reader, newline: int | None, *sizes: int):
    """Chameleon 7B, as it draws squares."""

    def decoder(size: int) -> ChameleonGridConfig:
        side = size // VQGAN.factor
        grid = side, side + (newline is not None)
        return ChameleonGridConfig(CHAMELEON_7B, grid, newline=newline)

    return PipelineConfig(
        name=name,
        decoders=tuple((size, decoder(size)) for size in sizes),
        vq=VQGAN,
        text=reader,
        defaults=Defaults(sizes[-1], 3.0, 1.0, 2000, 1.0),
        pixels="truncated",
    )


def _lumina(size: int) -> PipelineConfig:
    """Lumina-mGPT of one size: each has weights of its own."""
    reader = LuminaReader(NO_TOKENIZER, (size,))
    return _chameleon(f"lumina-7b-{size}", reader, NEWLINE, size)


def _anole() -> PipelineConfig:
    return _chameleon("anole-7b", AnoleReader(NO_TOKENIZER), None, 512)


PRESETS: dict[str, Callable[[], PipelineConfig]] = {
    "tar-1.5b": lambda: _tar("1.5b"),
    "tar-7b": lambda: _tar("7b"),
    "llamagen-b": lambda: _llamagen(768, False, 256, 384),
    "llamagen-l": lambda: _llamagen(1024, False, 256, 384),
    "llamagen-xl": lambda: _llamagen(1280, False, 256, 384),
    "llamagen-xxl": lambda: _llamagen(1536, False, 256, 384),
    "llamagen-3b": lambda: _llamagen(3200, False, 256, 384),
    "llamagen-t2i-xl": lambda: _llamagen(1280, True, 256, 512),
    "lumina-7b-512": lambda: _lumina(512),
    "lumina-7b-768": lambda: _lumina(768),
    "lumina-7b-1024": lambda: _lumina(1024),
    "anole-7b": _anole,
}


def preset(name: str) -> PipelineConfig:
    """The configuration of a published family.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]()


__all__ = ["PRESETS", "preset"]
