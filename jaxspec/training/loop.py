"""A training loop that can be killed at any moment and started again.

Everything that a step uses is in the state or follows from the step's number: batches
and keys are functions of it, and the learning rate is a schedule over steps. A run that
was killed and resumed therefore ends with the same weights as one that was not.
"""

import json
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
      folder: holds `checkpoints/`, `settings.json` and `log.jsonl`.
      settings: what the result depends on; another run's folder is refused.
      evaluate: called at each save; its numbers go to the log.
      log_every, save_every: in steps.
      items_per_step: how many examples a batch holds, for the throughput shown.

    Returns:
      The state after `steps` steps.

    Raises:
      ValueError: the folder holds a run with other settings.
      FloatingPointError: a logged loss was not finite.
    """
    import orbax.checkpoint as ocp  # slow to import

    folder = folder.absolute()
    check_settings(folder, settings)
    replicated, split = data_parallel()
    state = jax.device_put(state, replicated)
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

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        speed_estimate_period=300,
    )
    with progress, open(folder / "log.jsonl", "a") as log:
        task = progress.add_task(folder.name, total=steps, completed=start, note="")
        metrics: list[dict[str, jax.Array]] = []
        items, since = 0, time.monotonic()
        for i in range(start, steps):
            inputs = batch(i)
            items += items_per_step(inputs)
            state, m = compiled(state, jax.device_put(inputs, split))
            metrics.append(m)
            done = i + 1
            progress.update(task, completed=done)
            row: dict[str, float] = {}
            if done % log_every == 0 or done == steps:
                mean = {
                    k: float(np.mean([float(x[k]) for x in metrics if k in x]))
                    for k in metrics[0]
                }
                if not np.isfinite(mean["loss"]):
                    raise FloatingPointError(
                        f"the loss became {mean['loss']} before step {done}; the last "
                        f"good checkpoint is step {manager.latest_step()}"
                    )
                rate = items / (time.monotonic() - since)
                row = {"step": done, **mean, "per_second": round(rate, 2)}
                progress.update(
                    task, note=f"loss {mean['loss']:.4f}, {rate:.1f} examples/s"
                )
                metrics, items, since = [], 0, time.monotonic()
            if done % save_every == 0 or done == steps:
                manager.save(done, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
                if evaluate is not None:
                    began = time.monotonic()
                    row = {"step": done, **row, **evaluate(state)}
                    since += time.monotonic() - began
            if row:
                log.write(json.dumps(row) + "\n")
                log.flush()
                if not progress.console.is_terminal:
                    print(json.dumps(row), flush=True)
    manager.close()
    return state
