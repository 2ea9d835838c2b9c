from bolel.vura import sipo

def rilo(rak, sar):
    tet = sipo(rak, sar)
    return [tet]
