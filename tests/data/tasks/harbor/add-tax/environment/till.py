def with_tax(net):
    gross = net * 12 // 10
    return net
