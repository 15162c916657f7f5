"""The same plain loop in PyTorch: the energy, `torch.func.grad` of it, AdamW; run as it
is, or by way of `torch.compile`, which needs a C++ compiler. It takes its weights from a
model of the library, so that both compute the same.
"""

import jax
import numpy as np
import torch
from flax import nnx

from et_nbdev.vision.data import occlude
from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer


class TorchEnergyTransformer(torch.nn.Module):
    def __init__(self, model: ImageEnergyTransformer):
        super().__init__()
        self.config, self.eps = model.config, model.block.norm.eps
        copy = lambda p: torch.nn.Parameter(torch.tensor(np.asarray(p[...])))
        block, attention = model.block, model.block.attention
        self.Wq, self.Wk = copy(attention.Wq), copy(attention.Wk)
        self.xi, last = copy(block.memory.xi), model.norm
        self.gamma, self.delta = copy(block.norm.gamma), copy(block.norm.delta)
        self.last_gamma, self.last_delta = copy(last.gamma), copy(last.delta)
        self.mask, self.positions = copy(model.mask_token), copy(model.positions)
        self.enc, self.enc_bias = copy(model.encoder.kernel), copy(model.encoder.bias)
        self.dec, self.dec_bias = copy(model.decoder.kernel), copy(model.decoder.bias)
        self.beta = torch.tensor(np.asarray(attention.beta))[:, None, None]

    def norm(self, x, gamma, delta):
        x = x - x.mean(-1, keepdim=True)
        return gamma * x / torch.sqrt((x**2).mean(-1, keepdim=True) + self.eps) + delta

    def energy(self, g):
        "Eq. (3) and (5), summed over the batch."
        Q = torch.einsum("bnd,hdy->bhny", g, self.Wq)
        K = torch.einsum("bnd,hdy->bhny", g, self.Wk)
        scores = self.beta * (Q @ K.mT)
        own = torch.eye(g.shape[1], dtype=torch.bool)
        scores = scores.masked_fill(own, -torch.inf)
        attention = -(torch.logsumexp(scores, -1, keepdim=True) / self.beta).sum()
        return attention - 0.5 * (torch.relu(g @ self.xi.T) ** 2).sum()

    def forward(self, patches, masked):
        x = patches @ self.enc + self.enc_bias
        x = torch.where(masked[..., None], self.mask, x) + self.positions
        for _ in range(self.config.steps):
            g = self.norm(x, self.gamma, self.delta)
            x = x - self.config.step_size * torch.func.grad(self.energy)(g)
        return self.norm(x, self.last_gamma, self.last_delta) @ self.dec + self.dec_bias


def torch_work(kind: str, config: ImageConfig, batch: int, compiled: bool = False):
    "A thunk that does one inference or one training step."
    model = TorchEnergyTransformer(ImageEnergyTransformer(config, rngs=nnx.Rngs(0)))
    N = config.num_tokens
    hidden = occlude(jax.random.key(1), batch, N, N // 2, 0.1)
    occluded, masked = (torch.tensor(np.asarray(part)) for part in hidden)
    torch.manual_seed(0)
    patches = torch.randn(batch, N, config.patch_dim)
    call = torch.compile(model) if compiled else model
    if kind == "inference":

        def infer():
            with torch.no_grad():
                call(patches, masked)

        return infer
    optimizer = torch.optim.AdamW(model.parameters())

    def train():
        optimizer.zero_grad()
        predicted = call(patches, masked)
        ((predicted - patches) ** 2)[occluded].mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return train


def torch_of(model: ImageEnergyTransformer):
    "The same model, as a function of arrays."
    theirs = TorchEnergyTransformer(model)

    def predicted(*arrays):
        with torch.no_grad():
            return theirs(
                *(torch.tensor(np.asarray(array)) for array in arrays)
            ).numpy()

    return predicted
