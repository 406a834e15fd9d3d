"""A checkpoint and its dense twin."""


def test_the_dense_twin_holds_the_very_parameters(evaluated):
    """Tensors of the same memory would not do: a decode step may lay a model's parameters elsewhere."""
    ours, twins = (dict(model.named_parameters()) for model in (evaluated.model, evaluated.dense))
    assert ours.keys() == twins.keys()
    assert all(weight is ours[name] for name, weight in twins.items())
