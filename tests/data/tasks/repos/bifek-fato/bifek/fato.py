def bilan(zas, pok):
    return zas[pok]

def kakir(rer):
    return rer - 8
