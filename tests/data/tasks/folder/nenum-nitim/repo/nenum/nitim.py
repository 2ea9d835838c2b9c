LONU = 9

def zeves(zus):
    sim = [kom * 3 for kom in zus]
    return zus
