"""The head's part of the gradient, made in the forward sweep: the same gradients, and no head in the recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.own_head import own_head
from oomb_accel.loss import head_gradient, known_log_probs, target_log_probs
from oomb_accel.memory import StreamMemory
from tests.harness.batches import documents_of, packed, padded
from tests.harness.kept import num_kept
from tests.harness.models import VOCABULARY, tiny_model, twin, with_lora
from tests.harness.parity import assert_same_result, check_parity, chunked, config, reference, switched_on
from tests.harness.sparse import sparse
from tests.harness.tolerance import assert_same_bits

LENGTH, NUM_CHUNKS = 150, 10


@contextmanager
def logits_made(model: Any) -> Iterator[list[int]]:
    """Rows of every call that makes logits."""
    head, rows, plain = model.get_output_embeddings(), list[int](), nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is head.weight:
            rows.append(x.numel() // x.shape[-1])
        return plain(x, weight, bias)

    with patch.object(nn.functional, "linear", linear):
        yield rows


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_those_of_the_whole_model(weighted: bool) -> None:
    """Whatever the caller makes of the log-probabilities."""
    model = with_lora(tiny_model().double()).double()
    if not weighted:
        check_parity(model, packed(documents_of(LENGTH, 40)), config())
        return
    batch, trained = padded(documents_of(LENGTH)).batch, [p for p in model.parameters() if p.requires_grad]
    weights = torch.rand(1, LENGTH, dtype=torch.float64)
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    wanted = logits.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    wanted_grads = torch.autograd.grad((wanted.exp() * weights[:, :-1]).sum(), trained)
    with switched_on(model, config()):
        found = model(**batch).log_probs[:, :-1]
        grads = torch.autograd.grad((found.exp() * weights[:, :-1]).sum(), trained)
    for ours, theirs in zip(grads, wanted_grads, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("settings", [config(keep_last_graph=False), config(), sparse()])
def test_the_recompute_makes_no_logits(settings: Any) -> None:
    model, targets = with_lora(tiny_model()), LENGTH - 1
    with logits_made(model) as rows:
        chunked(twin(model), padded(documents_of(LENGTH)), settings)
        # The twin has a head of its own.
    assert rows == []
    with logits_made(model) as rows:
        chunked(model, padded(documents_of(LENGTH)), settings)
    assert sum(rows) == targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last_graph", [True, False])
def test_kept_or_made_again_is_the_same_to_the_bit(dtype: torch.dtype, last_graph: bool) -> None:
    model, results = with_lora(tiny_model()).to(dtype), []
    for keep in (True, False):
        with logits_made(copy := twin(model)) as rows:
            settings = config(keep_outputs=keep, keep_last_graph=last_graph)
            results.append(chunked(copy, padded(documents_of(LENGTH)), settings))
        again = 0 if keep else LENGTH - 1 - (6 - 1 if last_graph else 0)
        assert sum(rows) == LENGTH - 1 + again
    assert_same_bits(results[0].loss, results[1].loss)
    assert_same_bits(results[0].gradients, results[1].gradients)


def watched_head(model: Any) -> None:
    model.get_output_embeddings().register_forward_hook(lambda *_: None)


def trained_head(model: Any) -> None:
    model.get_output_embeddings().weight.requires_grad_()


def nothing(model: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("model_type", "change", "expected"),
    [
        ("qwen2", nothing, True),
        ("llama", nothing, True),
        ("mistral", nothing, True),
        ("qwen3_moe", nothing, True),
        ("gemma2", nothing, False),
        ("granite", nothing, False),
        ("qwen2", watched_head, False),
        ("qwen2", trained_head, False),
    ],
)
def test_which_heads(model_type: str, change: Any, expected: bool) -> None:
    model = with_lora(tiny_model(model_type))
    change(model)
    before, trunk = torch.random.get_rng_state(), model.get_decoder()
    with switched_on(model, config()):
        state = attachment_of(model)
        assert (own_head(state) is model.get_output_embeddings()) is expected
        assert torch.equal(torch.random.get_rng_state(), before)
        modules = (model.get_output_embeddings(), model.get_decoder())
        assert modules[1] is trunk
        assert not any("forward" in vars(module) for module in modules), "the trial leaves nothing behind"


@pytest.mark.parametrize("how", ["adapter", "all weights"])
def test_a_head_that_is_trained(how: str) -> None:
    if how == "adapter":
        model: Any = with_lora(tiny_model(), target_modules=["q_proj", "lm_head"])
    else:
        model = tiny_model()
    check_parity(model.double(), padded(documents_of(LENGTH)), config())


def test_the_head_has_its_room_first() -> None:
    """What a chunk of 16 tokens keeps of the head is 16 * (4 * 64 + 4) bytes."""
    found: list[int] = []

    def heads_of(room: int) -> list[int]:
        found.clear()
        with patch.object(StreamMemory, "begin", noted), patch.object(step_memory, "_spare_bytes", lambda *_: room):
            chunked(with_lora(tiny_model()), padded(documents_of(LENGTH)), config())
        return found

    begin = StreamMemory.begin

    def noted(memory: StreamMemory, *arguments: Any) -> None:
        if not found:
            assert not num_kept(memory, "attention")
            found.extend(sorted(num_kept(memory, "head"), reverse=True))
        begin(memory, *arguments)

    size = 16 * (4 * 64 + 4)
    assert sorted(heads_of(2 * size)) == [7, 8]
    assert heads_of(2 * size - 1) == [8]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_with_many_words(dtype: torch.dtype) -> None:
    """2,000 targets have the same factor."""
    torch.manual_seed(0)
    words, width, count = 5000, 32, 64
    head, h_ND = nn.Linear(width, words, bias=False).to(dtype), torch.randn(count, width, dtype=dtype)
    head.weight.requires_grad_(False)
    targets_N, grad_N = torch.randint(words, (count,)), torch.full((count,), 1 / 2000.3)
    grad_N = grad_N.double() if dtype == torch.float64 else grad_N
    exact = h_ND.double().requires_grad_()
    log_probs = target_log_probs(exact @ head.weight.double().t(), targets_N)
    (wanted,) = torch.autograd.grad(log_probs, exact, grad_N.double())
    x = h_ND.clone().requires_grad_()
    (plain,) = torch.autograd.grad(target_log_probs(head(x), targets_N), x, grad_N)
    leaf = h_ND.clone().requires_grad_()
    ours = known_log_probs(leaf, head_gradient(head, h_ND.clone(), targets_N, None))
    torch.testing.assert_close(ours.double(), log_probs.detach(), rtol=1e-2, atol=1e-2)
    (found,) = torch.autograd.grad(ours, leaf, grad_N)
    errors = [float((x.double() - wanted).norm() / wanted.norm()) for x in (found, plain)]
    assert found.dtype == dtype and errors[0] <= 1.5 * errors[1] + 1e-14
    size = float((found.double() * wanted).sum() / (wanted * wanted).sum())
    assert abs(size - 1) < {torch.bfloat16: 3e-4, torch.float16: 2e-4}.get(dtype, 1e-6), "no factor is lost"


def test_its_backward_has_the_precision_of_its_forward() -> None:
    """Autograd's threads do not know the caller's autocast dtype: for CUDA it would be fp16 there."""

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return grads[0]

    seen: list[bool] = []
    head = nn.Linear(8, 32, bias=False).requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        made = head_gradient(lambda h: Noted.apply(head(h)), torch.randn(4, 8), torch.zeros(4, dtype=torch.long), None)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False] and made.gradient_ND.dtype == torch.bfloat16


def test_the_trial_shows_nothing_to_those_who_watch() -> None:
    model, seen = with_lora(tiny_model()), list[int]()
    model.get_decoder().register_forward_hook(lambda _, __, out: seen.append(out[0].shape[1]))
    model.get_decoder().register_forward_pre_hook(lambda *_: seen.append(0))
    with logits_made(model) as rows, switched_on(model, config()):
        model(**padded(documents_of(20)).batch).loss.backward()
    assert seen == [0, 16, 0, 4, 0, 16] and sum(rows) == 19


def test_those_who_watch_what_lies_around_the_head_see_logits() -> None:
    model, seen = with_lora(tiny_model()), list[int]()
    watch = model.base_model.register_forward_hook(lambda _, __, out: seen.append(out.logits.shape[-1]))
    batch = padded(documents_of(LENGTH))
    with switched_on(model, config()):
        model(**batch.batch).loss.backward()
        assert seen == [VOCABULARY] * (2 * NUM_CHUNKS - 1)
        watch.remove()
        assert own_head(attachment_of(model)) is not None


def change_logits(base: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Have the model's forward do something with its logits."""
    plain = base.forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    base.forward = forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_the_model_makes_fp32(dtype: torch.dtype) -> None:
    """With weights in fp32 that changes nothing, but for what a model makes in 16 bits all the same."""
    model: Any = with_lora(tiny_model())
    base = model.get_base_model()
    change_logits(base, lambda logits: logits.float())
    base.model.norm.register_forward_hook(lambda _, __, out: out.to(dtype))
    base.lm_head.to(dtype)
    check = reference(model, documents_of(LENGTH))
    ours = chunked(model, padded(documents_of(LENGTH)), config())
    assert abs(float(ours.loss - check.loss)) < 1e-2


def test_a_model_that_changes_its_logits_from_some_step_on() -> None:
    model, batch = with_lora(tiny_model()), padded(documents_of(LENGTH)).batch
    with switched_on(model, config()):
        model(**batch).loss.backward()
        change_logits(model.get_base_model(), torch.tanh)
        with pytest.raises(RuntimeError, match="no longer returns as logits what its head makes"):
            model(**batch).loss.backward()


def test_a_compiled_head() -> None:
    model = with_lora(tiny_model())
    wanted = reference(twin(model), documents_of(40))
    model.get_output_embeddings().compile(backend="eager")
    assert_same_result(chunked(model, padded(documents_of(40)), config()), wanted)


def test_hooks_on_all_modules() -> None:
    model, seen = with_lora(tiny_model()), list[int]()
    head = model.get_output_embeddings()
    hook = register_module_forward_hook(lambda module, _, out: seen.append(out.shape[-1]) if module is head else None)
    try:
        chunked(model, padded(documents_of(40)), config())
    finally:
        hook.remove()
    assert seen == [VOCABULARY] * 5
