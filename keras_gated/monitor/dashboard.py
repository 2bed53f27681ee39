"""What TensorBoard shows beside plain scalars: prepared charts, pictures and histograms, as its protocol buffers.

Hidden here: the formats that TensorBoard's pages expect.
"""

from typing import NamedTuple

from tensorboard.compat.proto import summary_pb2, types_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as charts_metadata
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.image import metadata as image_metadata


class Chart(NamedTuple):
    """One chart of the page Custom Scalars."""

    title: str
    lines: tuple = ()  # tags, or their beginnings where they end in "/"
    bands: tuple = ()  # (lower, middle, upper) tags


def charts(categories):
    """{title of a group: [`Chart`]} -> a summary, to be written once."""
    layout = layout_pb2.Layout()
    for title, members in categories.items():
        category = layout.category.add(title=title)
        for chart in members:
            _add(category, chart)
    value = _value(charts_metadata.CONFIG_SUMMARY_TAG, charts_metadata.create_summary_metadata(), ())
    value.tensor.string_val.append(layout.SerializeToString())
    return value


def _add(category, chart):
    if chart.bands:
        series = [
            layout_pb2.MarginChartContent.Series(lower=lower, value=middle, upper=upper)
            for lower, middle, upper in chart.bands
        ]
        category.chart.add(title=chart.title, margin=layout_pb2.MarginChartContent(series=series))
    else:
        patterns = [_pattern(line) for line in chart.lines]
        category.chart.add(title=chart.title, multiline=layout_pb2.MultilineChartContent(tag=patterns))


def _pattern(line):
    """TensorBoard takes tags for regular expressions, which match from the start."""
    escaped = "".join(c if c.isalnum() or c in "_/" else f"\\{c}" for c in line)
    return f"^{escaped}" if line.endswith("/") else f"^{escaped}$"


def image(tag, png, size, description):
    """A picture; png are its bytes and size is (width, height)."""
    value = _value(tag, image_metadata.create_summary_metadata("", description, converted_to_tensor=True), (3,))
    value.tensor.string_val.extend([*(str(n).encode() for n in size), png])
    return value


def histogram(tag, edges, heights, description):
    """Bars: the k + 1 edges and k heights; drawn behind one another over the training steps."""
    value = _value(
        tag, histogram_metadata.create_summary_metadata("", description), (len(heights), 3), types_pb2.DT_DOUBLE
    )
    for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
        value.tensor.double_val.extend([left, right, height])
    return value


def _value(tag, metadata, shape, dtype=types_pb2.DT_STRING):
    value = summary_pb2.Summary.Value(tag=tag, metadata=metadata)
    value.metadata.data_class = (
        summary_pb2.DATA_CLASS_BLOB_SEQUENCE
        if metadata.plugin_data.plugin_name == "images"
        else summary_pb2.DATA_CLASS_TENSOR
    )
    value.tensor.dtype = dtype
    value.tensor.tensor_shape.SetInParent()
    for n in shape:
        value.tensor.tensor_shape.dim.add(size=n)
    return value
