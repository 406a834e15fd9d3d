"""How the shipped model is made and measured: training, tokenizer, held-out figures."""
