from natam.bugo import goge

def dobe(tul, ses):
    fal = goge(tul, ses)
    return fal
