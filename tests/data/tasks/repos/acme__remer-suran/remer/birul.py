from remer.suran import venom

def fama(gas):
    return ("gadum", venom(gas))
