"""Import graph of a tree's qerl: edges (src,dst,kind,names)."""
import ast,subprocess,sys,pathlib,json
def mods(root):
    fs=[f for f in subprocess.check_output(['git','ls-files','qerl'],text=True,cwd=root).split() if f.endswith('.py')]
    d={}
    for f in fs:
        m=f[:-3].replace('/','.')
        if m.endswith('.__init__'): m=m[:-9]
        d[m]=f
    return d
def edges(root):
    M=mods(root); out=[]
    for m,f in M.items():
        t=ast.parse((pathlib.Path(root)/f).read_text())
        def visit(n,kind):
            for c in ast.iter_child_nodes(n):
                k=kind
                if isinstance(c,(ast.FunctionDef,ast.AsyncFunctionDef,ast.Lambda)): k='lazy'
                if isinstance(c,ast.If) and 'TYPE_CHECKING' in ast.dump(c.test): k='type'
                if isinstance(c,ast.ImportFrom) and c.module:
                    for a in c.names:
                        full=c.module+'.'+a.name
                        out.append((m, full if full in M else c.module, k, a.name if full not in M else '', c.lineno))
                elif isinstance(c,ast.Import):
                    for a in c.names: out.append((m,a.name,k,'',c.lineno))
                visit(c,k)
        visit(t,'top')
    return M,out
if __name__=='__main__':
    root=sys.argv[1]
    M,E=edges(root)
    # heavy: transitively torch etc. at top
    HEAVY={'torch','transformers','peft','accelerate','datasets','triton','vllm','matplotlib','pandas','bitsandbytes','llmcompressor','scipy','numpy','lm_eval','lighteval','huggingface_hub','snakemake','math_verify','jinja2','cuda','trl','seaborn','pyarrow','safetensors','tokenizers','httpx','rich','typer'}
    top={m:set() for m in M}; ext={m:set() for m in M}
    for s,d,k,n,l in E:
        if k!='top': continue
        r=d.split('.')[0]
        if r=='qerl':
            if d in M: top[s].add(d)
            p=d
            while '.' in p:
                p=p.rpartition('.')[0]
                if p in M and p!='qerl' and p!=s: top[s].add(p)
        elif r in HEAVY: ext[s].add(r)
    tr={}
    def heavy(m,seen=None):
        seen=seen or set()
        st=[m]; seen={m}; h=set()
        while st:
            x=st.pop(); h|=ext[x]
            for y in top[x]:
                if y not in seen: seen.add(y); st.append(y)
        return h
    for m,f in sorted(M.items()):
        n=(pathlib.Path(root)/f).read_text().count('\n')
        imp=sorted({s for s,d,*_ in E if d==m})
        outs=sorted({(d[5:]+('' if k=='top' else '~' if k=='lazy' else '?')) for s,d,k,*_ in E if s==m and d in M and d!='qerl'})
        print(m[5:] or 'qerl',n,'|',','.join(sorted(heavy(m))),'| ->',' '.join(outs))
