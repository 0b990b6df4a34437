"""The matrix of what was proven exact."""

from bench.experiments.exactness import ExactnessRow, matrix


def test_a_matrix_has_a_line_per_model_and_optimizer_and_a_column_per_strategy():
    rows = [
        ExactnessRow(
            model="m", optimizer="sgd", strategy=strategy, steps=3, exact=strategy == "a", first_mismatch="w",
            compared={"gradients": 2}, dropped_share=0.5, reruns=1, prediction_error=0.0,
        )
        for strategy in ("a", "b")
    ]  # fmt: skip
    columns, lines = matrix(rows)
    assert columns == ("model", "optimizer", "a", "b")
    assert lines == [("m", "sgd", "exact, 50% dropped", "DIFFERS: w, 50% dropped")]
