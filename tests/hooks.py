"""Hooks on all parameters of a model, for tests of capture and of the rewritten step."""

import torch


def scales_what_was_accumulated(model):
    """Halves each gradient once it is there."""

    def halve(p):
        p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)


def updates_in_the_backward(model):
    """An optimizer of its own: each parameter is updated and its gradient let go in the backward."""

    @torch.no_grad()
    def update(p):
        p.sub_(0.01 * p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
