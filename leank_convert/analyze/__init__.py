"""Analysis: how a mask's channels are distributed, as text, numbers, figures and a page."""
