"""The classifier as it is trained, judged and handed to the kernels (C2T 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from c2t_kernels.network import MAX_HIDDEN, NodeStats, ScoringNetwork, counted_features, logit_of
from c2t_plugin.classifier.spec import ClassifierSpec
from c2t_plugin.errors import ClassifierError


class NodeClassifier(nn.Module):
    """Two-layer feed-forward network, ReLU, sigmoid (C2T 4.1): 3-48-1 has 241 parameters."""

    shift: Tensor
    scale: Tensor

    def __init__(self, spec: ClassifierSpec) -> None:
        super().__init__()
        self.spec = spec
        self.hidden = nn.Linear(len(spec.features), spec.hidden)
        self.out = nn.Linear(spec.hidden, 1)
        self.register_buffer("shift", torch.tensor(spec.shift, dtype=torch.float32), persistent=False)
        self.register_buffer("scale", torch.tensor(spec.scale, dtype=torch.float32), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Logit of acceptance: (..., n_features) float32, unscaled -> (...) float32."""
        return logit_of(
            features,
            shift=self.shift,
            scale=self.scale,
            hidden_weight=self.hidden.weight,
            hidden_bias=self.hidden.bias,
            out_weight=self.out.weight[0],
            out_bias=self.out.bias,
        )

    def confidence(self, stats: NodeStats) -> Tensor:
        """Confidence in [0, 1] of each node: stats of shape (...) -> (...) float32; NaN where stats are not finite."""
        return torch.sigmoid(self(self.features_of(stats)))

    def features_of(self, stats: NodeStats) -> Tensor:
        """What `forward` takes: stats of shape (...) -> (..., n_features) float32."""
        return counted_features(self.spec.features, stats, self.spec.depth_origin)

    def network(self, device: torch.device | str) -> ScoringNetwork:
        """A copy of this classifier as the kernels take it, on that device. Raises ClassifierError if that is too
        wide."""
        if self.spec.hidden > MAX_HIDDEN:
            raise ClassifierError(
                f"the classifier has {self.spec.hidden} hidden units, an engine takes at most {MAX_HIDDEN}: "
                "fit it with fewer (c2t fit --hidden)"
            )

        def as_tensor(weight: Tensor) -> Tensor:
            return weight.detach().float().contiguous().to(device, copy=True)

        return ScoringNetwork(
            self.spec.features,
            as_tensor(self.shift),
            as_tensor(self.scale),
            as_tensor(self.hidden.weight),
            as_tensor(self.hidden.bias),
            as_tensor(self.out.weight.flatten()),
            as_tensor(self.out.bias),
            self.spec.depth_origin,
        )
