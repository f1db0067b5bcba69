import importlib,pathlib,sys,time,traceback
skip=()
bad=0
for f in sorted(pathlib.Path('qerl').rglob('*.py')):
    m='.'.join(f.with_suffix('').parts).removesuffix('.__init__')
    if m in('qerl.__main__',) : continue
    try: importlib.import_module(m)
    except BaseException as e: print(m,type(e).__name__,str(e)[:200]); bad+=1
print('bad',bad)
