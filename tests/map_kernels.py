def draw_kernels(draw): raise NotImplementedError
