"""Learn which K cache channels an LLM needs, and write checkpoints that keep only those."""
