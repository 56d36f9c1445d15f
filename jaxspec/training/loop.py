"""A training loop that can be killed at any moment and started again.

Everything that a step uses is in the state or follows from the step's number: batches
and keys are functions of it, and the learning rate is a schedule over steps. A run that
was killed and resumed therefore ends with the same weights as one that was not.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.trees import flatten, unflatten


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a run carries from step to step, all of it saved.

    Attributes:
      step: int32 scalar, steps done.
      params: the trained parameters.
      ema: their exponential moving average, what is exported.
      opt_state: the optimiser's state.
      extra: anything else a loss keeps, such as codebook usage.
    """

    step: jax.Array
    params: Any
    ema: Any
    opt_state: Any
    extra: Any

    @staticmethod
    def create(
        params: Any, optimizer: optax.GradientTransformation, extra: Any = ()
    ) -> "TrainState":
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            ema=jax.tree.map(jnp.copy, params),
            opt_state=optimizer.init(params),
            extra=extra,
        )

    def update(
        self,
        grads: Any,
        optimizer: optax.GradientTransformation,
        decay: float,
        extra: Any = (),
    ) -> "TrainState":
        """One optimiser step; the average warms up so that it forgets the start."""
        updates, opt_state = optimizer.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        step = self.step + 1
        kept = jnp.minimum(decay, step / (step + 10))
        ema = jax.tree.map(lambda e, p: kept * e + (1 - kept) * p, self.ema, params)
        return TrainState(step, params, ema, opt_state, extra)


PARAMS = "ema.safetensors"


def save_params(path: Path, params: Any) -> None:
    """Writes nested dictionaries of arrays into one file, atomically."""
    partial = path.with_suffix(".tmp")
    save_file({k: np.asarray(x) for k, x in flatten(params).items()}, partial)
    os.replace(partial, path)


def load_params(folder: Path) -> Any:
    """The averaged parameters of the newest checkpoint in a run's folder, numpy."""
    path = folder / PARAMS
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no trained parameters: train it first")
    return unflatten(load_file(path))


def data_parallel() -> tuple[NamedSharding, NamedSharding]:
    """Shardings over all devices: of replicated state, and of batches."""
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    return replicated, NamedSharding(mesh, PartitionSpec("data"))


def check_settings(folder: Path, settings: dict) -> None:
    """Writes the run's settings, or raises if the folder holds other ones."""
    path = folder / "settings.json"
    settings = json.loads(json.dumps(settings))
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=1) + "\n")
        return
    found = json.loads(path.read_text())
    differ = [
        f"{k}: {found.get(k)!r} in the folder, {settings.get(k)!r} now"
        for k in sorted(found.keys() | settings.keys())
        if found.get(k) != settings.get(k)
    ]
    if differ:
        raise ValueError(
            f"{folder} holds a run with other settings ({'; '.join(differ)}); "
            "resume with the same ones, or choose another folder"
        )


def _truncate_log(path: Path, step: int) -> None:
    """Drops log lines after `step`: the steps that a kill lost are done again."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        kept = [x for x in lines if x.endswith("\n") and json.loads(x)["step"] <= step]
        path.write_text("".join(kept))


def fit(
    state: TrainState,
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]],
    batch: Callable[[int], Any],
    *,
    steps: int,
    folder: Path,
    settings: dict,
    evaluate: Callable[[TrainState], dict[str, float]] | None = None,
    log_every: int = 50,
    save_every: int = 250,
    items_per_step: Callable[[Any], int] = lambda b: len(jax.tree.leaves(b)[0]),
) -> TrainState:
    """Trains to `steps` steps, resuming from the newest checkpoint in `folder`.

    Args:
      state: the state at step 0; used only where the folder has no checkpoint.
      step: `(state, batch) -> (state, metrics)`, compiled here, the state donated.
      batch: the batch of a step number, a pytree of arrays, batch axis first, divisible
        by the number of devices.
      steps: total steps.
      folder: holds `checkpoints/`, `settings.json`, `log.jsonl`, and the averaged
        parameters of the newest checkpoint in `ema.safetensors`, for `load_params`.
      settings: what the result depends on; another run's folder is refused.
      evaluate: called at each save; its numbers go to the log.
      log_every, save_every: in steps; what is saved is also logged.
      items_per_step: how many examples a batch holds, for the throughput shown.

    Returns:
      The state after `steps` steps.

    Raises:
      ValueError: the folder holds a run with other settings.
      FloatingPointError: a loss, or a parameter to be saved, was not finite.
    """
    import orbax.checkpoint as ocp  # slow to import

    folder = folder.absolute()
    check_settings(folder, settings)
    replicated, split = data_parallel()
    # A copy: the step donates its state, and the caller's is the caller's.
    state = jax.device_put(state, replicated, may_alias=False)
    manager = ocp.CheckpointManager(
        folder / "checkpoints",
        options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True),
    )
    last = manager.latest_step()
    if last is not None:
        restored: Any = manager.restore(last, args=ocp.args.StandardRestore(state))
        state = restored
    start = int(state.step)
    _truncate_log(folder / "log.jsonl", start)
    compiled = jax.jit(step, donate_argnums=0)
    size = jax.jit(optax.tree.norm)

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        speed_estimate_period=300,
    )
    with manager, progress, open(folder / "log.jsonl", "a") as log:
        task = progress.add_task(folder.name, total=steps, completed=start, note="")
        metrics: list[dict[str, jax.Array]] = []
        items, since = 0, time.monotonic()
        inputs = batch(start) if start < steps else None
        for i in range(start, steps):
            items += items_per_step(inputs)
            state, m = compiled(state, jax.device_put(inputs, split))
            if i + 1 < steps:
                inputs = batch(i + 1)  # while the devices work
            # One step at a time: two in flight can starve each other of threads.
            metrics.append(jax.block_until_ready(m))
            done = i + 1
            progress.update(task, completed=done)
            row: dict[str, float] = {}
            save = done % save_every == 0 or done == steps
            if save or done % log_every == 0:  # nothing is saved that is not looked at
                mean = {
                    k: float(np.mean([float(x[k]) for x in metrics if k in x]))
                    for k in metrics[0]
                }
                # A step's loss is that of the parameters before it.
                norm = float(size(state.params)) if save else 0.0
                if not np.isfinite([mean["loss"], norm]).all():
                    what = "parameters" if np.isfinite(mean["loss"]) else "loss"
                    raise FloatingPointError(
                        f"the {what} became NaN or infinite by step {done}; the last "
                        f"good checkpoint is step {manager.latest_step()}"
                    )
                rate = items / (time.monotonic() - since)
                row = {"step": done, **mean, "per_second": round(rate, 2)}
                progress.update(
                    task, note=f"loss {mean['loss']:.4f}, {rate:.1f} examples/s"
                )
                metrics, items, since = [], 0, time.monotonic()
            began = time.monotonic()
            if save and evaluate is not None:
                row |= evaluate(state)
            if row:
                log.write(json.dumps(row) + "\n")
                log.flush()
                if not progress.console.is_terminal:
                    print(json.dumps(row), flush=True)
            if save:  # the checkpoint last: a kill before it does all of this again
                save_params(folder / PARAMS, state.ema)
                manager.save(done, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
            since += time.monotonic() - began
    return state
