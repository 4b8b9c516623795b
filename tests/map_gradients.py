def draw_gradients(draw): raise NotImplementedError
