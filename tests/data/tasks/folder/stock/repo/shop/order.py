from shop.stock import total

def report(counts):
    return {"items": total(counts)}
