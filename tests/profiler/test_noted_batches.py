"""Plain values of a batch that the step never looks at may change; a look at one is never missed."""
# ruff: noqa: RUF005, RUF015, RUF059, UP031 - steps as people write them

import copy
import json
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from profiler.tracing.guards import Noted
from profiler.tracing.whole_step import capture
from tests.profiler import small

Sample = namedtuple("Sample", ["images", "path", "weight"])


def loss_of(model, images):
    return model(images).square().mean()


def of_dict(batch):
    return batch["images"]


def of_dict_with_a_look(batch):
    return batch["images"] * len(batch["path"])


def by_keys(batch):
    return [batch[key] for key in batch if key == "images"][0]


def by_get(batch):
    return batch["images"] * (2 if batch.get("path") else 1)


def by_items(batch):
    return {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}["images"]


def by_stars(batch):
    return (lambda images, **rest: images)(**batch)


def by_a_copy(batch):
    return dict(batch)["images"]


def by_json(batch):
    json.dumps({key: value for key, value in copy.copy(batch).items() if key == "path"})
    return batch["images"]


def by_a_union(batch):
    return ({"other": 1} | batch)["images"]


def after_writing(batch):
    batch["path"] = "own"
    return batch["images"] * len(batch["path"])


def by_equality(batch):
    return batch["images"] * (2 if batch["meta"] == ("a", 1) else 1)


def of_nested(batch):
    return batch["images"] * batch["meta"][1]


DICTS = {
    of_dict: set(),
    of_dict_with_a_look: {"path"},
    by_keys: set(),
    by_get: {"path"},
    by_items: {"path"},
    by_stars: {"path"},
    by_a_copy: {"path"},
    by_json: {"path"},
    by_a_union: {"path"},
    after_writing: set(),
    by_equality: {"meta0", "meta1"},
    of_nested: {"meta1"},
}


@pytest.mark.parametrize("read", DICTS, ids=lambda read: read.__name__)
def test_a_dict_notes_what_is_looked_at(read):
    noted = Noted({"images": torch.ones(2), "path": "a/b", "meta": ("a", 1)})
    read(noted.batch)
    names = {1: "path", 2: "meta0", 3: "meta1"}
    assert {name for leaf, name in names.items() if leaf not in noted.unread} == DICTS[read]


def unpacks_all_uses_one(batch):
    images, path, weight = batch
    return images


def unpacks_all_uses_two(batch):
    images, path, weight = batch
    return images * weight


def unpacks_into_a_closure(batch):
    images, path, weight = batch
    return (lambda: path)(), images


def unpacks_and_asks_for_all(batch):
    images, path, weight = batch
    return locals()["images"]


def by_index(batch):
    return batch[0] * batch[-1]


def by_a_slice(batch):
    return batch[:2][0]


def by_a_loop(batch):
    for value in batch:
        if isinstance(value, torch.Tensor):
            return value
    return None


def by_star(batch):
    return (lambda images, *rest: images)(*batch)


def by_list(batch):
    return list(batch)[0]


def by_a_sum(batch):
    return ((1,) + tuple(batch) if isinstance(batch, tuple) else [1] + batch)[1]


def by_containment(batch):
    return batch[0] * (2 if "a/b" in batch[1:] else 1)


def unpacks_into_an_object(batch):
    class Holder:
        pass

    images, Holder.path, weight = batch
    return images


SEQUENCES = {
    unpacks_all_uses_one: set(),
    unpacks_all_uses_two: {"weight"},
    unpacks_into_a_closure: {"path"},
    unpacks_and_asks_for_all: {"path", "weight"},
    by_index: {"weight"},
    by_a_slice: {"path", "weight"},
    by_a_loop: {"path", "weight"},
    by_star: {"path", "weight"},
    by_list: {"path", "weight"},
    by_a_sum: {"path", "weight"},
    by_containment: {"path", "weight"},
    unpacks_into_an_object: {"path", "weight"},
}


@pytest.mark.parametrize("kind", [tuple, list, Sample._make], ids=["tuple", "list", "named tuple"])
@pytest.mark.parametrize("read", SEQUENCES, ids=lambda read: read.__name__)
def test_a_sequence_notes_what_is_looked_at(read, kind):
    noted = Noted(kind([torch.ones(2), "a/b", 0.5]))
    read(noted.batch)
    assert {name for leaf, name in {1: "path", 2: "weight"}.items() if leaf not in noted.unread} == SEQUENCES[read]


def test_the_fields_of_a_named_tuple_are_noted():
    noted = Noted(Sample(torch.ones(2), "a/b", 0.5))
    assert isinstance(noted.batch, Sample)
    assert noted.unread == {1, 2}
    assert noted.batch.weight == 0.5
    assert noted.unread == {1}


def test_a_batch_of_tensors_alone_is_the_users_own():
    batch = {"images": torch.ones(2), "more": [torch.ones(1), (torch.ones(1),)]}
    noted = Noted(batch)
    assert noted.batch is batch
    assert not noted.is_another


def test_a_batch_that_notes_is_a_tree_like_the_users_own():
    batch = {"images": torch.ones(2), "meta": ("a", [1, 2.0])}
    doubled = pytree.tree_map_only(torch.Tensor, lambda t: 2 * t, Noted(batch).batch)
    assert type(doubled) is dict
    assert doubled["meta"] == ("a", [1, 2.0])


def test_the_values_of_a_container_that_cannot_note_count_as_read():
    noted = Noted((torch.ones(1), OrderedDict(path="a/b"), "unread"))
    assert noted.unread == {2}


def around_the_container(batch):
    return "%s" % (tuple.__getitem__(batch, 1),)


def test_a_look_around_the_container_fails():
    with pytest.raises(TypeError, match="read around the container"):
        around_the_container(Noted((torch.ones(1), "a/b")).batch)


# -- captured -----------------------------------------------------------------------------------------------------


def batch_of(**plain):
    images, labels = small.data()
    return {"images": images, "labels": labels, **plain}


def ordinary(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch["images"]), batch["labels"])
    loss.backward()
    optimizer.step()
    return loss


def weighted(model, optimizer, batch):
    return batch["weight"] * ordinary(model, optimizer, batch)


def of_sizes(model, optimizer, batch):
    """Hands a list of numbers to torch, which looks at it in its own way."""
    optimizer.zero_grad()
    loss = model(batch["images"].view(batch["shape"])).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def captured(step, batch):
    _, model, optimizer, _ = small.make()()
    return capture(step, model, optimizer, batch).convention


def test_a_plain_value_that_the_step_never_reads_may_change():
    convention = captured(ordinary, batch_of(path="a", index=1, tags=["x", "y"]))
    assert convention.check(batch_of(path="b", index=2, tags=["z", "y"])) == []
    assert "is a" in convention.check(batch_of(path="b", index=2, tags=["z"]))[0]


def test_a_plain_value_that_the_step_reads_is_noticed_by_its_place():
    convention = captured(weighted, batch_of(path="a", weight=0.5))
    said = ["batch leaf 3 (batch['weight']) was 0.5 and is 0.75"]
    assert convention.check(batch_of(path="b", weight=0.75)) == said
    assert convention.guards.batch.changed_entries(batch_of(path="b", weight=0.75)) == ["batch['weight']"]


def test_numbers_that_torch_itself_looks_at_count_as_read():
    convention = captured(of_sizes, batch_of(shape=[12, 6], path="a"))
    assert convention.check(batch_of(shape=[12, 6], path="a")) == []
    assert "batch['shape'][0]" in convention.check(batch_of(shape=[6, 12], path="a"))[0]


def test_the_gradients_of_a_batch_that_are_wanted_or_not_are_noticed():
    convention = captured(ordinary, batch_of())
    other = batch_of()
    other["images"].requires_grad_()
    assert convention.check(other) == ["batch leaf 0.requires_grad was False and is True"]
