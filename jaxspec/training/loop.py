"""A training loop that can be killed at any moment and started again.

Everything that a step uses is in the state or follows from the step's number: batches
and keys are functions of it, and the learning rate is a schedule over steps. A run that
was killed and resumed therefore ends with the same weights as one that was not.
"""

import json
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
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
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    manager = ocp.CheckpointManager(folder / "checkpoints", options=options)
    last = manager.latest_step()
    if last is not None:
        restored: Any = manager.restore(last, args=ocp.args.StandardRestore(state))
        state = restored
    start = int(state.step)
    compiled = jax.jit(step, donate_argnums=0)
    with manager, _Report(folder, start, steps) as report:
        inputs = batch(start) if start < steps else None
        for done in range(start + 1, steps + 1):
            items = items_per_step(inputs)
            state, metrics = compiled(state, jax.device_put(inputs, split))
            if done < steps:
                inputs = batch(done)  # while the devices work
            # One step at a time: two in flight can starve each other of threads.
            report.note(done, jax.block_until_ready(metrics), items)
            save = done % save_every == 0 or done == steps
            if not save and done % log_every:
                continue
            # A step's loss is that of the parameters before it, so both are looked at.
            mean = report.mean()
            _check_finite(mean["loss"], state if save else None, done, manager)
            with report.pause():
                report.write(mean | (evaluate(state) if save and evaluate else {}))
                if save:  # the checkpoint last: a kill before it does all of this again
                    save_params(folder / PARAMS, state.ema)
                    manager.save(done, args=ocp.args.StandardSave(state))
                    manager.wait_until_finished()
    return state


_norm = jax.jit(optax.tree.norm)


def _check_finite(loss: float, state: TrainState | None, step: int, manager) -> None:
    """Raises if the loss, or a parameter that is to be saved, is not a number."""
    finite_params = state is None or np.isfinite(float(_norm(state.params)))
    if np.isfinite(loss) and finite_params:
        return
    what = "parameters" if np.isfinite(loss) else "loss"
    raise FloatingPointError(
        f"the {what} became NaN or infinite by step {step}; the last good checkpoint "
        f"is step {manager.latest_step()}"
    )


class _Report:
    """The log of a run and its progress bar."""

    def __init__(self, folder: Path, start: int, steps: int):
        path = folder / "log.jsonl"
        _truncate_log(path, start)
        self.file = open(path, "a")
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            speed_estimate_period=300,
        )
        self.task = self.progress.add_task(
            folder.name, total=steps, completed=start, note=""
        )
        self.step, self.metrics, self.items = start, [], 0
        self.since = time.monotonic()

    def __enter__(self) -> "_Report":
        self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        self.progress.stop()
        self.file.close()

    def note(self, step: int, metrics: dict[str, jax.Array], items: int) -> None:
        """A step is done."""
        self.step, self.items = step, self.items + items
        self.metrics.append(metrics)
        self.progress.update(self.task, completed=step)

    def mean(self) -> dict[str, float]:
        """Means over the steps since the last call, and items a second."""
        rows = self.metrics
        mean = {
            k: float(np.mean([float(x[k]) for x in rows if k in x])) for k in rows[0]
        }
        rate = self.items / (time.monotonic() - self.since)
        note = f"loss {mean['loss']:.4f}, {rate:.1f} examples/s"
        self.progress.update(self.task, note=note)
        self.metrics, self.items, self.since = [], 0, time.monotonic()
        return mean | {"per_second": round(rate, 2)}

    @contextmanager
    def pause(self) -> Generator[None]:
        """What is done inside does not count as training time."""
        began = time.monotonic()
        yield
        self.since += time.monotonic() - began

    def write(self, row: dict[str, float]) -> None:
        line = json.dumps({"step": self.step} | row)
        self.file.write(line + "\n")
        self.file.flush()
        if not self.progress.console.is_terminal:
            print(line, flush=True)
