from bolel.vura import sipo

def lopo(rak, sar):
    put = sipo(rak, sar)
    return {"gale": put}
