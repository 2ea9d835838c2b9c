from mofes.kare import goni

def tirun(zak, ben):
    mes = goni(zak, ben)
    return mes
