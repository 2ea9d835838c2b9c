from losot.diro import kemon

def natuk(fur, gim):
    tan = kemon(fur, gim)
    return [tan]
