import torch
from torch import nn

from fxaudit.execution.probes import probes
from fxaudit.model.load import subject
from fxaudit.model.trace import trace

X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids, mask):
        return self.table(ids) * mask.unsqueeze(-1)


def test_a_floating_point_input_is_varied_in_five_ways():
    traced = trace(subject(nn.Linear(4, 4), (X,)))
    x = X[:1]
    found = {name: leaves[0] for name, leaves in probes(traced, [x]).items()}
    assert list(found) == ["constant", "repeated", "scaled 0.01", "scaled 5", "sign-flipped"]
    torch.testing.assert_close(found["constant"], x.mean().expand_as(x))
    assert torch.equal(found["repeated"], torch.stack([x[:, 0]] * 5, 1))
    torch.testing.assert_close(found["scaled 5"], 5 * x)
    torch.testing.assert_close(found["scaled 0.01"], 0.01 * x)
    assert torch.equal(found["sign-flipped"], -x)


def test_token_ids_stay_ids_of_the_input_and_masks_stay():
    ids, mask = torch.tensor([[3, 1, 4, 1, 5]] * 2), torch.ones(2, 5)
    traced = trace(subject(Embedded(), {"ids": ids, "mask": mask}))
    found = probes(traced, [ids[:1], mask[:1]])
    assert {name: leaves[0].tolist() for name, leaves in found.items()} == {
        "constant": [[3, 3, 3, 3, 3]],
        "repeated": [[3, 1, 4, 3, 1]],
    }
    assert all(torch.equal(leaves[1], mask[:1]) for leaves in found.values())


def test_an_input_that_nothing_can_vary_has_no_probe():
    traced = trace(subject(nn.Linear(4, 4), (X,)))
    assert probes(traced, [torch.zeros(1, 5, 4)]) == {}
