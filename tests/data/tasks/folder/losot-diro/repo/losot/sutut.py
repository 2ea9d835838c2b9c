from losot.diro import kemon

def geti(fur, gim):
    return [kemon(fur, gim)]
