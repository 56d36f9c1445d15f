"""The training loop on a line through points: kills, faults, devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxspec.training.loop as loop
from jaxspec.training import TrainState, fit, load_params

STEPS, ROOT = 10, Path(__file__).parents[1]
OPTIMIZER = optax.adam(0.1)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(step).normal(size=(4, 3)).astype(np.float32)
    return x, x @ np.float32([1, -2, 3]) + 1


def step(state: TrainState, batch):
    def loss(params):
        x, y = batch
        got = x @ params["w"] + jnp.broadcast_to(params["b"], y.shape)
        return jnp.square(got - y).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.update(grads, OPTIMIZER, 0.5, state.extra + 1), {"loss": value}


def begin() -> TrainState:
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    return TrainState.create(params, OPTIMIZER, jnp.int32(0))


def evaluate(state: TrainState) -> dict[str, float]:
    return {"w0": float(state.ema["w"][0])}


def run(folder: Path, **changes) -> TrainState:
    """Saves at 4, 8 and 10, logs at 3, 4, 6, 8, 9 and 10."""
    arguments = dict(
        state=begin(),
        step=step,
        batch=batch,
        steps=STEPS,
        folder=folder,
        settings={"rate": 0.1, "sizes": (1, 2)},
        evaluate=evaluate,
        log_every=3,
        save_every=4,
    )
    return fit(**{**arguments, **changes})


def log(folder: Path) -> list[dict]:
    """The log, but for how long things took."""
    rows = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k != "per_second"} for row in rows]


class Killed(BaseException):
    pass


def killed_at(step: int):
    def until(i: int):
        if i == step:
            raise Killed
        return batch(i)

    return until


def kill(*_, **__):
    raise Killed


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An unbroken run: its folder and last state."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, run(folder)


def test_what_a_run_does(whole):
    folder, state = whole
    assert state.step == state.extra == STEPS
    rows = log(folder)
    assert [row["step"] for row in rows] == [3, 4, 6, 8, 9, 10]
    assert [row["step"] for row in rows if "w0" in row] == [4, 8, 10]
    # By hand, without checkpoints: a logged loss is the mean since the last.
    state, losses = begin(), []
    for i in range(STEPS):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), state, whole[1]
    )
    want = [np.mean(x) for x in np.split(losses, [3, 4, 6, 8, 9])]
    np.testing.assert_allclose([row["loss"] for row in rows], want, rtol=1e-4)


def test_the_average_by_hand():
    """Its weight warms up: 1/11 of the start is kept, then min(1/2, 2/12)."""
    state = TrainState.create({"w": jnp.float32(11.0)}, optax.sgd(1.0))
    state = state.update({"w": jnp.float32(11.0)}, optax.sgd(1.0), 0.5)
    np.testing.assert_allclose([state.params["w"], state.ema["w"]], [0, 1], rtol=1e-6)
    state = state.update({"w": jnp.float32(-6.0)}, optax.sgd(1.0), 0.5)
    np.testing.assert_allclose(
        [state.params["w"], state.ema["w"]], [6, 31 / 6], rtol=1e-6
    )
    assert state.step == 2


@pytest.mark.parametrize("at", [(0,), (1, 3), (4,), (5, 5, 7), (9,)])
def test_killed_and_started_again(whole, tmp_path, at):
    for i in at:
        with pytest.raises(Killed):
            run(tmp_path / "run", batch=killed_at(i))
    assert_same(run(tmp_path / "run"), whole[1])
    assert log(tmp_path / "run") == log(whole[0])
    assert_same(load_params(tmp_path / "run"), whole[1].ema)


def test_killed_while_it_evaluates_or_saves(whole, tmp_path, monkeypatch):
    """Before, between and after what a save writes; half a log line is left."""
    import orbax.checkpoint as ocp

    with pytest.raises(Killed):
        run(tmp_path, evaluate=kill)
    for module, name in ((loop, "save_params"), (ocp.CheckpointManager, "save")):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(module, name, kill)
            run(tmp_path)
    with pytest.raises(Killed):
        run(tmp_path, batch=killed_at(6))
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    assert_same(run(tmp_path), whole[1])
    assert log(tmp_path) == log(whole[0])


def test_killed_after_the_last_save(whole, tmp_path, monkeypatch):
    """A finished run started again does nothing, and its parameters are the last."""
    import orbax.checkpoint as ocp

    save = ocp.CheckpointManager.save

    def save_and_die(self, done, **arguments):
        save(self, done, **arguments)
        self.wait_until_finished()
        if done == STEPS:
            raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(ocp.CheckpointManager, "save", save_and_die)
        run(tmp_path)
    assert_same(run(tmp_path, batch=kill), whole[1])
    assert_same(load_params(tmp_path), whole[1].ema)
    assert log(tmp_path) == log(whole[0])


def test_the_caller_s_state_is_its_own(tmp_path):
    state = begin()
    run(tmp_path, state=state, steps=1)
    np.testing.assert_array_equal(state.params["w"], 0)


def test_other_settings_are_refused_by_name(whole):
    said = (
        r"other settings \(rate: 0.1 in the folder, 0.2 now; seed: None in .*, 1 now\)"
    )
    with pytest.raises(ValueError, match=said):
        run(whole[0], settings={"rate": 0.2, "sizes": [1, 2], "seed": 1})


def test_no_parameters_before_the_first_save(tmp_path):
    with pytest.raises(FileNotFoundError, match="train it first"):
        load_params(tmp_path)


def spoiled(i: int, value: float):
    """Batches whose `i`th has a value that is no number."""

    def spoil(j: int):
        x, y = batch(j)
        return x, y * np.float32(value if i == j else 1)

    return spoil


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_no_number_stops_the_run(tmp_path, value):
    said = "the loss became NaN or infinite by step 6; the last good .* is step 4"
    with pytest.raises(FloatingPointError, match=said):
        run(tmp_path, batch=spoiled(4, value))
    assert [row["step"] for row in log(tmp_path)] == [3, 4]
    # Step 8, the first after the fault that would be saved, is not there.
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["4"]


def test_a_gradient_that_is_no_number_is_not_saved(tmp_path):
    def nan_gradient(state, batch):
        new, metrics = step(state, batch)
        spoil = jnp.where(state.step == 3, jnp.nan, 0)
        params = {**new.params, "b": new.params["b"] + spoil}
        return loop.TrainState(new.step, params, new.ema, new.opt_state, 0), metrics

    said = "the parameters became NaN or infinite by step 4; .* is step None"
    with pytest.raises(FloatingPointError, match=said):
        run(tmp_path, step=nan_gradient, state=begin())


# Devices.

TWO = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 2)
from tests import test_training
assert jax.device_count() == 2
test_training.run(Path(sys.argv[1]))
"""


def test_two_devices_do_what_one_does(whole, tmp_path):
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", TWO, str(folder)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        load_params(folder),
        load_params(whole[0]),
    )
    for got, want in zip(log(folder), log(whole[0]), strict=True):
        assert got == pytest.approx(want, rel=1e-4)
