"""Evaluation: what a checkpoint loses against its own dense model, on one prefill.

Nothing is imported here: the command line imports `commands`, and `--help` is not to wait for torch.
"""
