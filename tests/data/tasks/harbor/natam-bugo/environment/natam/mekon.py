from natam.bugo import goge

def ribom(tul, ses):
    return [goge(tul, ses)]
