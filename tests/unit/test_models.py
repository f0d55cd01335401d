"""Models: against closed forms, and against what a change of input may and may not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from train.config import ModelConfig
from train.data import Spec
from train.errors import UsageError
from train.models import (
    GPT,
    MLP,
    Block,
    build_model,
    default_loss,
    rotate,
)
from train.rules import PRESETS

TOKENS = Spec("tokens", 256, 256)
TABLE = Spec("classes", inputs=10, outputs=5)


def small_gpt(**more: Any) -> GPT:
    torch.manual_seed(1)
    return GPT(vocab_size=31, block_size=12, layers=2, heads=2, width=16, **more).double()


def spread(model: nn.Module) -> None:
    """Weights large enough that everything matters."""
    torch.manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)


# The GPT


@pytest.mark.parametrize("place", [1, 5, 11])
def test_a_changed_token_leaves_all_earlier_logits_and_moves_the_later_ones(place: int) -> None:
    model = small_gpt()
    spread(model)
    tokens = torch.randint(31, (2, 12))
    before = model(tokens)
    tokens[:, place] = (tokens[:, place] + 1) % 31
    after = model(tokens)
    assert torch.equal(before[:, :place], after[:, :place])
    moved = (before[:, place:] - after[:, place:]).abs().amax(-1)
    assert (moved > 1e-6).all()


def test_samples_of_a_batch_do_not_see_each_other() -> None:
    model = small_gpt()
    spread(model)
    tokens = torch.randint(31, (3, 12))
    torch.testing.assert_close(model(tokens)[1:2], model(tokens[1:2]), rtol=0, atol=1e-12)


def test_shorter_inputs_give_the_same_logits() -> None:
    model = small_gpt()
    spread(model)
    tokens = torch.randint(31, (2, 12))
    torch.testing.assert_close(model(tokens[:, :7]), model(tokens)[:, :7], rtol=0, atol=1e-12)


def test_the_order_of_earlier_tokens_matters() -> None:
    model = small_gpt()
    spread(model)
    logits = model(torch.tensor([[3, 7, 9], [7, 3, 9]]))
    assert (logits[0, -1] - logits[1, -1]).abs().max() > 1e-3


def angles(positions: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turn = positions.double()[:, None] * torch.tensor(
        [10000.0 ** (-i / half) for i in range(half)], dtype=torch.float64
    )
    return turn.cos(), turn.sin()


def test_rotary_positions_keep_lengths_and_leave_position_0() -> None:
    x = torch.randn(9, 8, dtype=torch.float64)
    turned = rotate(x, *angles(torch.arange(9), 4))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[0], x[0])
    assert (turned[1:] - x[1:]).abs().amax(-1).min() > 0.01


def test_rotary_positions_make_products_depend_on_distance_alone() -> None:
    query, key = torch.randn(2, 8, dtype=torch.float64)

    def product(i: int, j: int) -> float:
        cos, sin = angles(torch.tensor([i, j]), 4)
        turned = rotate(torch.stack((query, key)), cos, sin)
        return float(turned[0] @ turned[1])

    assert product(2, 0) == pytest.approx(product(7, 5), rel=1e-12)
    assert product(4, 9) == pytest.approx(product(100, 105), rel=1e-12)
    assert product(2, 0) != pytest.approx(product(3, 0), rel=1e-3)


def test_a_rotation_is_multiplication_by_a_complex_number() -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    cos, sin = angles(torch.arange(5), 4)
    turned = torch.complex(x[:, :4], x[:, 4:]) * torch.complex(cos, sin)
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat((turned.real, turned.imag), dim=-1))


def test_the_models_angles_are_those_of_the_paper() -> None:
    cos, sin = angles(torch.arange(12), 4)
    torch.testing.assert_close(GPT(31, 12, 1, 2, 16).cos, cos.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(GPT(31, 12, 1, 2, 16).sin, sin.float(), rtol=0, atol=1e-6)


def test_a_block_equals_one_written_out_with_a_mask() -> None:
    torch.manual_seed(3)
    block = Block(width=8, heads=2, dropout=0.0).double()
    spread(block)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    cos, sin = angles(torch.arange(5), 2)

    def normed(values: torch.Tensor, gain: torch.Tensor | float = 1.0) -> torch.Tensor:
        centred = values - values.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    query, key, value = (normed(x[0], block.norm_1.weight) @ block.query_key_value.weight.T).split(8, dim=-1)
    seen = []
    for head in (slice(0, 4), slice(4, 8)):
        q, k, v = rotate(normed(query[:, head]), cos, sin), rotate(normed(key[:, head]), cos, sin), value[:, head]
        rows = []
        for t in range(5):
            weight = torch.stack([q[t] @ k[s] / 2.0 for s in range(t + 1)]).exp()
            rows.append((weight / weight.sum()) @ v[: t + 1])
        seen.append(torch.stack(rows))
    middle = x[0] + torch.cat(seen, dim=-1) @ block.mix.weight.T
    hidden = (normed(middle, block.norm_2.weight) @ block.up.weight.T).clamp(min=0) ** 2
    torch.testing.assert_close(block(x, cos, sin)[0], middle + hidden @ block.down.weight.T, rtol=0, atol=1e-10)


def parameters_of(vocab_size: int, layers: int, width: int) -> int:
    """Tied embedding, and a block: 3 + 1 + 4 + 4 squares of the width, and two gains; one gain at the end."""
    return vocab_size * width + layers * (12 * width**2 + 2 * width) + width


def test_the_124m_preset_has_the_parameters_of_its_name() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(preset="124M"), Spec("tokens", 50304, 50304), 1024)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == parameters_of(50304, 12, 768) == 123_587_328


@pytest.mark.parametrize("preset", ["tiny", "small", "10M"])
def test_presets_have_the_shape_they_say(preset: Any) -> None:
    layers, heads, width = PRESETS[preset]
    with torch.device("meta"):
        model = build_model(ModelConfig(preset=preset), TOKENS, 64)
    assert isinstance(model, GPT)
    assert sum(p.numel() for p in model.parameters()) == parameters_of(256, layers, width)
    assert len(model.blocks) == layers
    assert model.blocks[0].heads == heads
    assert model.block_size == 64


def test_shape_fields_override_the_preset() -> None:
    config = ModelConfig(layers=1, heads=2, width=12, dropout=0.25, checkpoint_activations=True)
    model = build_model(config, TOKENS, 8)
    assert isinstance(model, GPT)
    assert sum(p.numel() for p in model.parameters()) == parameters_of(256, 1, 12)
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert (block.heads, block.dropout, model.checkpoint_activations) == (2, 0.25, True)


def test_a_new_gpts_blocks_pass_on_what_comes_in() -> None:
    model = small_gpt()
    tokens = torch.randint(31, (4, 12))
    table = model.embedding.weight
    expected = F.layer_norm(table[tokens], (16,)) @ table.T
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-12)


def test_weights_start_so_that_the_variance_of_what_goes_in_is_kept() -> None:
    model = GPT(vocab_size=500, block_size=8, layers=2, heads=2, width=256)
    x = torch.randn(2000, 256)
    up = model.get_parameter("blocks.0.up.weight").detach()
    assert float((x @ up.T).var()) == pytest.approx(1.0, rel=0.05)
    assert float(model.embedding.weight.detach().square().sum(1).mean()) == pytest.approx(1.0, rel=0.05)


def test_recomputed_activations_give_the_same_gradients() -> None:
    tokens, targets = torch.randint(31, (2, 12)), torch.randint(31, (2, 12))
    gradients = []
    for recompute in (False, True):
        model = small_gpt(checkpoint_activations=recompute, dropout=0.2)
        spread(model)
        torch.manual_seed(9)
        loss, _ = default_loss(model(tokens), targets)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))
    assert all(g is not None and float(g.abs().sum()) > 0 for g in gradients[0])


def test_activations_are_really_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forward = Block.forward

    def counted(self: Block, *args: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return forward(self, *args)

    monkeypatch.setattr(Block, "forward", counted)
    for recompute, expected in ((False, 2), (True, 4)):
        calls.clear()
        small_gpt(checkpoint_activations=recompute)(torch.randint(31, (1, 4))).sum().backward()
        assert len(calls) == expected


def test_dropout_is_for_training_only() -> None:
    model = small_gpt(dropout=0.5)
    spread(model)
    tokens = torch.randint(31, (1, 12))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_generation_goes_on_from_the_prompt_past_the_block_size() -> None:
    model = small_gpt().eval()
    prompt = torch.tensor([4, 5, 6])
    torch.manual_seed(0)
    written = model.generate(prompt, 20)
    assert written[:3].tolist() == [4, 5, 6]
    assert len(written) == 23
    torch.manual_seed(0)
    assert torch.equal(model.generate(prompt, 20), written)


def test_a_cold_generation_takes_the_likeliest_token() -> None:
    model = small_gpt().eval()
    spread(model)
    prompt = torch.tensor([4, 5, 6])
    written = model.generate(prompt, 4, temperature=1e-4)
    for place in range(3, 7):
        assert written[place] == model(written[None, :place])[0, -1].argmax()


# The others


def test_the_mlp_is_the_tutorials() -> None:
    model = build_model(ModelConfig(name="mlp"), TABLE, 0)
    assert isinstance(model, MLP)
    assert [tuple(p.shape) for p in model.parameters()] == [(20, 10), (20,), (5, 20), (5,)]
    x = torch.randn(3, 10)
    by_hand = (x @ model.fc1.weight.T + model.fc1.bias).clamp(min=0) @ model.fc2.weight.T + model.fc2.bias
    torch.testing.assert_close(model(x), by_hand)


def test_the_linear_model_has_one_layer() -> None:
    model = build_model(ModelConfig(name="linear"), TABLE, 0)
    assert [tuple(p.shape) for p in model.parameters()] == [(5, 10), (5,)]


@pytest.mark.parametrize(
    ("config", "spec", "words"),
    [
        (ModelConfig(), TABLE, "model.name: gpt reads tokens, but the data holds classes"),
        (ModelConfig(heads=3, width=128), TOKENS, "model.heads: width 128 / heads 3 must be a whole, even number"),
        (ModelConfig(name="mlp"), Spec("own"), "mlp cannot know the shape of your own data; bring a model too"),
        (ModelConfig(name="linear"), Spec("own"), "linear cannot know the shape of your own data"),
    ],
)
def test_what_does_not_fit_is_refused(config: ModelConfig, spec: Spec, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_model(config, spec, 8)
    assert words in str(caught.value)


def test_your_own_model_gets_its_arguments(mine: Any) -> None:
    mine.build = lambda width: nn.Linear(width, 1)
    model = build_model(ModelConfig(name="my_models:build", args={"width": 6}), TABLE, 0)
    assert [tuple(p.shape) for p in model.parameters()] == [(1, 6), (1,)]


def test_your_own_model_must_be_a_module(mine: Any) -> None:
    mine.build = lambda: 7
    with pytest.raises(UsageError, match=r"my_models:build must return a torch\.nn\.Module, not a int"):
        build_model(ModelConfig(name="my_models:build"), TABLE, 0)
