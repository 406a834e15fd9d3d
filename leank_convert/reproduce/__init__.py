"""The paper's experiments on the shipped model: masks by every method, answers through all of them, a report.

`bin/reproduce`, or `python -m leank_convert.reproduce`. Everything made is kept in one folder and made once.
"""
