BASAS = 7

def lidet(zit):
    return zit - 2

def kemon(fur, gim):
    return divmod(gim, fur)
