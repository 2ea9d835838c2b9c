from remer.suran import venom

def dupas(gas):
    return venom(gas)
