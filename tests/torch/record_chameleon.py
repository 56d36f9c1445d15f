"""Records what transformers' Chameleon and its VQVAE make of synthetic weights.

    OMP_NUM_THREADS=1 python -m tests.torch.record_chameleon

Writes the manifests and expected outputs `chameleon_tiny` (one pair of norms for all
heads, as Lumina-mGPT stores them), `chameleon_tiny_34b` (a pair for each head, grouped
heads, norms of what the branches return) and `chameleon_vq_tiny` under tests/fixtures.
transformers has the encoder of the VQVAE only; the decoder is Janus's, which is the
same but for attention at the lowest resolution, which is taken out.
"""

import re

import torch
import transformers
from transformers.models.chameleon.configuration_chameleon import ChameleonVQVAEConfig
from transformers.models.chameleon.modeling_chameleon import ChameleonVQVAE
from transformers.models.janus.configuration_janus import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAEDecoder

from tests.fixtures import synthetic
from tests.torch.record import PROMPTS, left_padded, save

NEW = 8
CHAMELEON = {
    "model_type": "chameleon",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,  # positions turn visibly within a dozen tokens
    "swin_norm": False,
    "tie_word_embeddings": False,
    "mask_image_logits": False,
}
LARGE = CHAMELEON | {"num_key_value_heads": 2, "swin_norm": True}
VQ = {
    "base_channels": 32,
    "channel_multiplier": [1, 1, 2],
    "num_res_blocks": 2,
    "latent_channels": 32,
    "embed_dim": 16,
    "num_embeddings": 64,
}
SIDE = 4  # of the code grid


def shapes(model, **changed) -> dict:
    """Tensors of a manifest: those of a model, with some shapes changed."""
    found = {key: list(x.shape) for key, x in model.state_dict().items()} | changed
    return {k: {"shape": shape, "dtype": "float32"} for k, shape in found.items()}


def record_language(name: str, args: dict, shared: bool, seed: int) -> None:
    # Without image tokens in the map, transformers masks none of the logits.
    config = transformers.ChameleonConfig(
        **args, vocabulary_map={"<image>": 95}, vq_config=VQ
    )
    model = transformers.ChameleonForConditionalGeneration(config).eval()
    tensors = {k: x for k, x in shapes(model).items() if "vqmodel" not in k}
    for key, tensor in tensors.items():
        if shared and re.search("[qk]_norm", key):
            tensor["shape"][0] = 1
    manifest = {
        "name": name,
        "about": "transformers' ChameleonForConditionalGeneration; args are its "
        "config.json",
        "seed": seed,
        "args": args,
        "tensors": tensors,
    }
    weights = {
        k: torch.from_numpy(x).expand(model.state_dict()[k].shape)
        for k, x in synthetic.state_dict(manifest).items()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert all("vqmodel" in key for key in missing) and not unexpected

    tokens, mask = left_padded(PROMPTS)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model.generation_config.pad_token_id = 0
    with torch.inference_mode():
        out = model(
            tokens,
            attention_mask=mask,
            position_ids=positions,
            output_hidden_states=True,
        )
        greedy = [
            model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
            )[0, len(prompt) :]
            for prompt in PROMPTS
        ]
    expected = {
        "tokens": tokens.to(torch.int32).numpy(),
        "mask": mask.to(torch.int32).numpy(),
        "states_1": out.hidden_states[1].numpy(),
        "states_2": out.hidden_states[2].numpy(),
        "logits": out.logits.numpy(),
        "greedy": torch.stack(greedy).to(torch.int32).numpy(),
    }
    save(manifest, expected)


def decoder_key(key: str, levels: int) -> str:
    """Janus's name as Chameleon has it, which counts levels from the highest."""
    return re.sub(r"up\.(\d+)", lambda m: f"up.{levels - 1 - int(m[1])}", key)


def record_vq(seed: int) -> None:
    model = ChameleonVQVAE(ChameleonVQVAEConfig(**VQ)).eval()
    decoder = JanusVQVAEDecoder(JanusVQVAEConfig(**VQ)).eval()
    for level in decoder.up:
        level.attn = torch.nn.ModuleList()
    levels = len(VQ["channel_multiplier"])
    names = {key: decoder_key(key, levels) for key in decoder.state_dict()}
    tensors = shapes(model) | {
        f"decoder.{names[key]}": x for key, x in shapes(decoder).items()
    }
    manifest = {
        "name": "chameleon_vq_tiny",
        "about": "transformers' ChameleonVQVAE, and JanusVQVAEDecoder without the "
        "attention in its levels; names as in Meta's vqgan.ckpt",
        "seed": seed,
        "args": VQ,
        "tensors": tensors,
    }
    weights = {
        k: torch.from_numpy(x) for k, x in synthetic.state_dict(manifest).items()
    }
    own = {k: x for k, x in weights.items() if not k.startswith("decoder.")}
    model.load_state_dict(own)
    decoder.load_state_dict(
        {key: weights[f"decoder.{name}"] for key, name in names.items()}
    )
    generator = torch.manual_seed(0)
    image = torch.rand(2, 3, SIDE, SIDE, generator=generator) * 2 - 1
    # A colour a cell: what varies within cells is lost on random weights.
    image = torch.nn.functional.interpolate(image, scale_factor=2 ** (levels - 1))
    tokens = torch.randint(VQ["num_embeddings"], (2, SIDE**2), generator=generator)
    with torch.inference_mode():
        latents = model.quant_conv(model.encoder(image))
        codes = model.encode(image).image_tokens.reshape(2, SIDE**2)
        quantised = model.quantize.embedding(tokens).reshape(2, SIDE, SIDE, -1)
        decoded = decoder(model.post_quant_conv(quantised.permute(0, 3, 1, 2)))
    assert len(codes.unique()) > 8
    expected = {
        "image": image.numpy(),
        "pre_quant": latents.numpy(),
        "indices": codes.to(torch.int32).numpy(),
        "decode_indices": tokens.to(torch.int32).numpy(),
        "decoded": decoded.numpy(),
    }
    save(manifest, expected)


if __name__ == "__main__":
    torch.set_num_threads(1)
    record_language("chameleon_tiny", CHAMELEON, shared=True, seed=21)
    record_language("chameleon_tiny_34b", LARGE, shared=False, seed=22)
    record_vq(seed=23)
