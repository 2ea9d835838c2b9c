SUZOT = 2

def bara(dol):
    return dol * 7

def goge(tul, ses):
    return tul + ses
