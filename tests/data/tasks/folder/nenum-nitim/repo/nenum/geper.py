from nenum.nitim import zeves

def dita(zus):
    return {"lusal": zeves(zus)}
