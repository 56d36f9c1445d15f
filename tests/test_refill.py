"""Rows that are handed on draw what batches draw."""

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.recipe import Recipe
from tests import toy

METHODS = {
    "SCD": jaxspec.SCD(window=3),
    "MuLo": jaxspec.MuLo(threshold=0.3, neighbours=2, radius=0, window=2),
}


def streamed(recipe: Recipe, images: int, **how):
    """All images of a prompt, in order, and how many came at a time."""
    params = recipe.params
    asked = params.ask(["red heart", "blue tree", "a hat"]).take(np.arange(images) % 3)
    numbers, found, sizes = np.arange(images) // 3, {}, []
    for which, batch in recipe.stream(asked, numbers, 3, **how):
        sizes.append(len(which))
        for row, image in enumerate(which):
            assert image not in found
            found[image] = jax.tree.map(lambda x, r=row: x[r], batch.stats)
    return [found[i] for i in range(images)], sizes


@pytest.mark.parametrize("name", METHODS)
def test_an_image_is_the_same_in_whatever_row(name):
    family, method = toy.family(), METHODS[name]
    prompts = ["red heart", "blue tree", "a hat"]
    wanted = jaxspec.generate(family, prompts, method=method, num_images=3, seed=3)
    recipe = Recipe.create(family, method=method).unstacked()
    found, sizes = streamed(recipe, 9, rows=4, group=2)
    assert len(sizes) > 2  # not all at a time
    for i, stats in enumerate(found):
        place = i % 3 * 3 + i // 3  # there all images of a prompt are neighbours
        own = jax.tree.map(lambda x, p=place: x[p], wanted.stats)
        jax.tree.map(np.testing.assert_array_equal, stats, own)
    with toy.compilations() as compiled:
        again, _ = streamed(recipe, 9, rows=4, group=2)
    assert compiled == []
    jax.tree.map(np.testing.assert_array_equal, again, found)


def test_few_images_one_row_and_whole_groups():
    recipe = Recipe.create(toy.family(), size=8).unstacked()
    (alone,), _ = streamed(recipe, 1, rows=2)
    three, _ = streamed(recipe, 3, rows=1)
    two, _ = streamed(recipe, 3, rows=2, group=2)
    jax.tree.map(np.testing.assert_array_equal, three, two)
    jax.tree.map(np.testing.assert_array_equal, three[0], alone)


def test_a_drafter_with_conditions_of_its_own_is_refused():
    family = toy.family()
    draft = family.target(family.condition(["a hat"]), jaxspec.Sampling.create(12), 8)
    recipe = Recipe.create(family, method=jaxspec.MuLo(draft=draft, neighbours=4))
    with pytest.raises(ValueError, match="conditions change with the images"):
        streamed(recipe, 1, rows=1)
