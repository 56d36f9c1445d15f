"""Records what transformers' Qwen2 and T5 encoder make of synthetic weights.

    OMP_NUM_THREADS=1 python -m tests.torch.record

Writes the manifests and expected outputs `qwen2_tiny`, `qwen2_tiny_tied` and `t5_tiny`
under tests/fixtures, and `siglip2_positions`, a table of positions as SigLIP2 resizes
it, for the tests that run without torch.
"""

import json

import numpy as np
import torch
import transformers
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from tests.fixtures import synthetic
from tests.parity import FOLDER

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,  # positions turn visibly within a dozen tokens
    "tie_word_embeddings": False,
}
T5 = {
    "model_type": "t5",
    "vocab_size": 64,
    "d_model": 40,
    "d_kv": 8,  # heads are wider than the states, taken together
    "d_ff": 56,
    "num_layers": 3,
    "num_heads": 6,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "feed_forward_proj": "gated-gelu",
}
PROMPTS = ([5, 17, 80, 3], [9, 60, 33, 71, 2, 48, 14, 90, 25])
NEW = 10


def build(name: str, kind, config, args: dict, about: str, seed: int):
    """The model with synthetic weights, and its manifest."""
    model = kind(config).eval()
    tied = {"lm_head.weight"} if args.get("tie_word_embeddings") else set()
    tied |= {"encoder.embed_tokens.weight"}
    tensors = {
        key: {"shape": list(x.shape), "dtype": "float32"}
        for key, x in model.state_dict().items()
        if key not in tied
    }
    manifest = {"name": name, "about": about, "seed": seed, "args": args}
    manifest["tensors"] = tensors
    weights = {
        k: torch.from_numpy(x) for k, x in synthetic.state_dict(manifest).items()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= tied and not unexpected, (missing, unexpected)
    return model, manifest


def save(manifest: dict, expected: dict) -> None:
    name = manifest["name"]
    text = json.dumps(manifest, indent=1) + "\n"
    (FOLDER / "manifests" / f"{name}.json").write_text(text)
    np.savez_compressed(FOLDER / "expected" / f"{name}.npz", **expected)
    print(name, {key: np.shape(x) for key, x in expected.items()})


def left_padded(prompts) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(rows), torch.tensor(mask)


def record_qwen2(name: str, tied: bool, seed: int) -> None:
    args = QWEN2 | {"tie_word_embeddings": tied}
    config = transformers.Qwen2Config(**args)
    model, manifest = build(
        name,
        transformers.Qwen2ForCausalLM,
        config,
        args,
        "transformers' Qwen2ForCausalLM; args are its config.json",
        seed,
    )
    tokens, mask = left_padded(PROMPTS)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model.generation_config.pad_token_id = 0
    greedy = dict(max_new_tokens=NEW, do_sample=False)
    with torch.inference_mode():
        logits = model(tokens, attention_mask=mask, position_ids=positions).logits
        alone = [
            model.generate(torch.tensor([prompt]), **greedy)[0, len(prompt) :]
            for prompt in PROMPTS
        ]
        punished = [
            model.generate(torch.tensor([p]), repetition_penalty=1.5, **greedy)
            for p in PROMPTS
        ]
    punished = [row[0, len(p) :] for row, p in zip(punished, PROMPTS, strict=True)]
    expected = {
        "tokens": tokens.to(torch.int32).numpy(),
        "mask": mask.to(torch.int32).numpy(),
        "logits": logits.numpy(),
        "greedy": torch.stack(alone).to(torch.int32).numpy(),
        "greedy_penalty1p5": torch.stack(punished).to(torch.int32).numpy(),
    }
    save(manifest, expected)


def record_t5(seed: int) -> None:
    config = transformers.T5Config(**T5)
    model, manifest = build(
        "t5_tiny",
        transformers.T5EncoderModel,
        config,
        T5,
        "transformers' T5EncoderModel; args are its config.json",
        seed,
    )
    tokens = torch.randint(T5["vocab_size"], (2, 40), generator=torch.manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 23:] = 0
    with torch.inference_mode():
        states = model(tokens, attention_mask=mask).last_hidden_state
    expected = {
        "tokens": tokens.to(torch.int32).numpy(),
        "mask": mask.to(torch.int32).numpy(),
        "states": states.numpy(),
    }
    save(manifest, expected)


def record_positions() -> None:
    """A 16 by 16 table, as TA-Tok's decoder has it, at the grids of Tar's scales."""
    table = torch.from_numpy(synthetic.tensor("positions", (16, 16, 4), seed=14))
    resize = Siglip2VisionEmbeddings.resize_positional_embeddings
    expected = {"table": table.numpy()}
    for side in (27, 13, 9):
        resized = resize(table, torch.tensor([[side, side]]), side * side)[0]
        expected[f"side{side}"] = resized.reshape(side, side, 4).numpy()
    np.savez_compressed(FOLDER / "expected" / "siglip2_positions.npz", **expected)
    print("siglip2_positions", {key: x.shape for key, x in expected.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    record_qwen2("qwen2_tiny", tied=False, seed=11)
    record_qwen2("qwen2_tiny_tied", tied=True, seed=12)
    record_t5(seed=13)
    record_positions()
