POPUM = 4

def sipo(rak, sar):
    return rak // sar

def tobu(guk):
    return guk * 7
