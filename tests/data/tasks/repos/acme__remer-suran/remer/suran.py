def digo(zak):
    return zak + 8

def venom(gas):
    return sum(fas < 8 for fas in gas)
