"""Breaks lines of docstrings and comments that became longer than 120 characters."""
import subprocess,tokenize,sys,pathlib
out=subprocess.run(['ruff','check','--select','E501','--output-format','concise','qerl','tests'],capture_output=True,text=True).stdout
bad={}
for l in out.split('\n'):
    p=l.split(':')
    if len(p)>3: bad.setdefault(p[0],[]).append(int(p[1]))
for f,lines in bad.items():
    L=pathlib.Path(f).read_text().split('\n')
    docs=set()
    with open(f,'rb') as fh:
        for t in tokenize.tokenize(fh.readline):
            if t.type==tokenize.STRING and t.string.startswith('"""') or t.type==tokenize.COMMENT: docs|=set(range(t.start[0],t.end[0]+1))
    for n in sorted(lines,reverse=True):
        if n not in docs: print('BY HAND: long line',f,n); continue
        i=n-1
        for _ in range(8):
            line=L[i]
            if len(line)<=120: break
            ind=line[:len(line)-len(line.lstrip())]
            lead=ind+('#: ' if line.lstrip().startswith('#: ') else '# ' if line.lstrip().startswith('#') else '')
            cut=line.rfind(' ',0,120)
            head,tail=line[:cut],line[cut+1:]
            L[i]=head
            if tail.endswith('"""') and tail.count('"""')==1 and '"""' in head:   # a docstring of one line
                L[i+1:i+1]=[ind+tail[:-3],ind+'"""']
                break
            nxt=L[i+1] if i+1<len(L) else ''
            same=nxt.startswith(lead) and nxt.strip() not in ('','"""','#') and not nxt[len(lead):].startswith((' ','*','-','"""','|')) and (bool(lead.strip())==nxt.lstrip().startswith('#'))
            if same and not tail.endswith('"""'): L[i+1]=lead+tail+' '+nxt[len(lead):]
            else: L.insert(i+1,lead+tail)
            i+=1
    pathlib.Path(f).write_text('\n'.join(L))
