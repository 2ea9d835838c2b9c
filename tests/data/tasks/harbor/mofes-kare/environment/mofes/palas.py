from mofes.kare import goni

def kona(zak, ben):
    dum = goni(zak, ben)
    return [dum]
