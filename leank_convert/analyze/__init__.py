"""Analysis: how the channels of a mask are distributed, as text, numbers, figures and a page."""
