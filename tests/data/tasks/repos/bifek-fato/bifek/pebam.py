from bifek.fato import bilan

def revi(zas, pok):
    fal = bilan(zas, pok)
    return fal
