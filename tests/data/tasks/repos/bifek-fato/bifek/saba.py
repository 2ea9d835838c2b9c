from bifek.fato import bilan

def samuk(zas, pok):
    mal = bilan(zas, pok)
    return {"robo": mal}
