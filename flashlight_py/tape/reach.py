from __future__ import annotations
import functools, types
from typing import Any
import numpy as np
from flashlight_py.autograd import Variable

class Place:
    def __init__(self, get, set, words): self.get, self.set, self._w = get, set, words
    def words(self): return self._w

class Reach:
    def __init__(self, function):
        self.variables=[]; self.arrays=[]; self._seen=set()
        self._walk(function, 0)
    def changed(self, live): return []
    def _place(self, get, set, words): self.arrays.append(Place(get,set,words))
    def _walk(self, o, depth):
        if id(o) in self._seen or depth>12: return
        self._seen.add(id(o))
        if isinstance(o, types.FunctionType):
            for c in o.__closure__ or ():
                try: v=c.cell_contents
                except ValueError: continue
                if isinstance(v, np.ndarray): self._place(lambda c=c: c.cell_contents, lambda x,c=c: setattr(c,'cell_contents',x), 'cell')
                else: self._walk(v, depth+1)
            names=set(); codes=[o.__code__]
            while codes:
                k=codes.pop(); names|=set(k.co_names); codes+= [x for x in k.co_consts if isinstance(x, types.CodeType)]
            for n in names:
                if n in o.__globals__:
                    v=o.__globals__[n]
                    if isinstance(v,np.ndarray): self._place(lambda g=o.__globals__,n=n:g[n], lambda x,g=o.__globals__,n=n:g.__setitem__(n,x), n)
                    else: self._walk(v, depth+1)
        elif isinstance(o, types.MethodType):
            self._walk(o.__self__, depth+1); self._walk(o.__func__, depth+1)
        elif isinstance(o, functools.partial):
            self._walk(o.func, depth+1)
            for a in o.args: self._walk(a, depth+1)
        elif isinstance(o, Variable):
            self.variables.append(o)
            for n in ('data','grad','buffer'):
                self._place(lambda n=n: getattr(o,n), lambda x,n=n: setattr(o,n,x), n)
            if o.hook is not None: self._walk(o.hook, depth+1)
        elif isinstance(o, (list,)):
            for i,v in enumerate(o):
                if isinstance(v,np.ndarray): self._place(lambda i=i:o[i], lambda x,i=i:o.__setitem__(i,x), f'[{i}]')
                else: self._walk(v, depth+1)
        elif isinstance(o, tuple):
            for v in o: self._walk(v, depth+1)
        elif isinstance(o, dict):
            for i,v in list(o.items()):
                if isinstance(v,np.ndarray): self._place(lambda i=i:o[i], lambda x,i=i:o.__setitem__(i,x), f'[{i}]')
                else: self._walk(v, depth+1)
        elif isinstance(o, (types.ModuleType, type)) or isinstance(o,(int,float,str,bytes,types.BuiltinFunctionType)): return
        elif hasattr(o,'__dict__') and type(o).__module__.startswith('flashlight_py') and 'distributed' not in type(o).__module__ or type(o).__module__ in('__main__',) and hasattr(o,'__dict__'):
            self._walk(o.__dict__, depth+1)
