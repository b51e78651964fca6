
def row(x, p): return x[:1]
