from nenum.nitim import zeves

def katit(zus):
    return {"zopon": zeves(zus)}
