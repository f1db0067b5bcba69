"""Checks targets.txt on a tree: coverage, circles between targets and rooms, collisions of names."""
import sys,ast,pathlib,collections
sys.path.insert(0,str(__import__('pathlib').Path(__file__).resolve().parent))
from graph import edges
root=sys.argv[1]
M,E=edges(root)
T={};order={}
for l in open(__import__('pathlib').Path(__file__).with_name('targets.txt')):
    if '<-' not in l or l.startswith('#'): continue
    t,s=l.split('<-'); t=t.strip(); order[t]=s.split()
    for x in order[t]: assert x not in T,x; T[x]=t
tm={}
for m,f in M.items():
    k=f[5:]
    if k in T: tm[m]=T[k]
    elif not k.endswith('__init__.py'): print('UNMAPPED',k)
for s in T:
    if not (pathlib.Path(root)/'qerl'/s).exists(): print('MISSING',s)
G=collections.defaultdict(set);R=collections.defaultdict(lambda: collections.defaultdict(set))
room=lambda t:t.split('/')[0].removesuffix('.py')
for s,d,k,n,l in E:
    if s in tm and d in tm and tm[s]!=tm[d]:
        G[tm[s]].add(tm[d])
        a,b=room(tm[s]),room(tm[d])
        if a!=b: R[a][b].add(f'{s}->{d}:{k}')
def sccs(G):
    import sys; sys.setrecursionlimit(10000)
    idx={};low={};st=[];on=set();out=[];c=[0]
    def go(v):
        idx[v]=low[v]=c[0];c[0]+=1;st.append(v);on.add(v)
        for w in G.get(v,()):
            if w not in idx: go(w);low[v]=min(low[v],low[w])
            elif w in on: low[v]=min(low[v],idx[w])
        if low[v]==idx[v]:
            s=[]
            while True:
                w=st.pop();on.discard(w);s.append(w)
                if w==v:break
            out.append(s)
    for v in list(G):
        if v not in idx: go(v)
    return out
for s in sccs(G):
    if len(s)>1:
        print('CIRCLE',s)
        for a in s:
            for b in G[a]:
                if b in s: print('   ',a,'->',b,[f'{x}->{y}:{k}:{n}' for x,y,k,n,_ in E if tm.get(x)==a and tm.get(y)==b][:4])
RG={a:set(b) for a,b in R.items()}
ss=sccs(RG)
print('ROOM ORDER',[s for s in reversed(ss)])
for s in ss:
    if len(s)>1:
        for a in s:
            for b in RG.get(a,()):
                if b in s: print('  R',a,'->',b,sorted(R[a][b])[:6], len(R[a][b]))
sizes={t:sum((pathlib.Path(root)/'qerl'/x).read_text().count('\n') for x in o if (pathlib.Path(root)/'qerl'/x).exists()) for t,o in order.items()}
print('modules',len(order), 'big',{t:n for t,n in sizes.items() if n>700},'small',{t:n for t,n in sizes.items() if n<90})
def defs(p):
    t=ast.parse(p.read_text());d=set();i={}
    for n in t.body:
        if isinstance(n,(ast.FunctionDef,ast.ClassDef,ast.AsyncFunctionDef)): d.add(n.name)
        elif isinstance(n,(ast.Assign,ast.AnnAssign,ast.AugAssign,ast.TypeAlias if hasattr(ast,'TypeAlias') else ast.Assign)):
            for x in ast.walk(n):
                if isinstance(x,ast.Name) and isinstance(x.ctx,ast.Store): d.add(x.id)
        elif isinstance(n,(ast.If,ast.Try,ast.With,ast.For)):
            for x in ast.walk(n):
                if isinstance(x,ast.Name) and isinstance(x.ctx,ast.Store): d.add(x.id)
    return d
for t,o in order.items():
    c=collections.defaultdict(list)
    for x in o:
        p=pathlib.Path(root)/'qerl'/x
        if p.exists():
            for n in defs(p): c[n].append(x)
    for n,v in sorted(c.items()):
        if len(v)>1: print('COLL',t,n,v)
