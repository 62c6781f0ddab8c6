"""What the decoder's features cost at 64 x 8192: query tokens, order of heads, float16, mixed formats."""

from __future__ import annotations

from benchmarks import cases, loads
from benchmarks.decode import measure, shrunk
from benchmarks.session import Row, Session


def measure_features(session: Session) -> None:
    """Rows "features": `price` is the time over that of the plain decoder of the same format, less 1. Rows
    "mixed": K and V of different formats."""
    (base,) = shrunk(session, (loads.BASE,))
    plain: Row | None = None
    for feature, case in cases.features(session.formats, base):
        labels = {"load": case.load.label, "format": case.fmt.name, "feature": feature}
        row = session.attempt("features", labels, lambda c=case: measure(session, c))
        if feature == "plain":
            plain = row
        elif row and plain:
            row["price"] = row["median_us"] / plain["median_us"] - 1
            session.say(f"{feature}: {100 * row['price']:+.1f}%")
    for case in cases.mixed(session.formats, base):
        labels = {"load": case.load.label, "format": case.fmt.name, "value_format": case.values.name}
        session.attempt("mixed", labels, lambda c=case: measure(session, c))
