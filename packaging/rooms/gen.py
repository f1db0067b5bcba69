import json,re,pathlib
H=pathlib.Path(__file__).resolve().parent
T={}
for l in (H/'targets.txt').read_text().split('\n'):
    if '<-' in l and not l.startswith('#'):
        t,s=l.split('<-'); T[t.strip()]={'sources':s.split()}
docs={}
if (H/'docs.txt').exists():
    for block in (H/'docs.txt').read_text().split('\n@')[0:]:
        block=block.lstrip('@'); name,_,text=block.partition('\n')
        if name.strip(): docs[name.strip()]=text.strip()
for n,d in docs.items():
    if n in T: T[n]['doc']=d
ren={}
if (H/'renames.txt').exists():
    for l in (H/'renames.txt').read_text().split('\n'):
        if l.strip() and not l.startswith('#'):
            f,rest=l.split(':',1)
            ren.setdefault(f.strip(),{}).update(dict(x.split('=') for x in rest.split()))
for t,spec in T.items():
    r={s:ren[s] for s in spec['sources'] if s in ren}
    if r: spec['rename']=r
sec=[l.strip() for l in (H/'nosection.txt').read_text().split()] if (H/'nosection.txt').exists() else []
for t,spec in T.items():
    x={s:'' for s in spec['sources'] if s in sec}
    if x: spec['section']=x
P={'layers':'models','policy':'models','quantization':'models','random_models':'models','plan':'workflow','jobs':'jobs','prepare':'workflow','by_hand':'api','publishing':'publish','pretrain':'rl','provenance':'host','bench.decode':'bench','bench.grpo_step':'bench','bench.rollout_mix':'bench','rollout.engine':'rollout','rollout.vllm':'rollout','kernels.portable':'kernels.triton','kernels.w4a16':'kernels.cuda','report.study':'study','results.schema':'results.schema','trackers':'trackers'}
packages={'qerl.'+k:'qerl.'+v for k,v in P.items()}
rooms={
 'models':'Models: a frozen base in any format with its LoRA, its loading, quantization and export.',
 'kernels':'CUDA and Triton kernels of decode steps, prefill and updates, and reference implementations in PyTorch.',
 'kernels/triton':'Kernels in Triton, imported on GPUs alone.',
 'kernels/cuda':'Kernels in CUDA C++, compiled at first use by NVRTC.',
 'study':'The exploration study: data, comparisons, tables, figures and page (docs/exploration-protocol.md).',
 'workflow':'The workflow: plans of a configuration, their jobs, files and cost, and the preparation of runs.',
 'rollout':'Samplers: the protocol, the eager sampler for CPUs, the engine for GPUs, and vLLM.',
 'host':'Services of the machine: GPU leases, imports, console, time and memory, and the origin of results.',
 'bench':'Benches of speed and memory: decoding, rollouts, prompts and GRPO steps, beside vLLM, TRL and transformers.',
 'results':'The contract of results: paths and schemas of all files under results/, their writers and readers, and intervals.',
}
data={f'qerl/kernels/w4a16/{n}.cu':f'qerl/kernels/cuda/{n}.cu' for n in ['epilogue','instructions','kernel','lora','many_rows','pipeline','tile_scheduler']}
data['qerl/kernels/unpack.cu']='qerl/kernels/cuda/unpack.cu'
u='tests/unit/'
folders={u+a:u+b for a,b in {'bench/decode':'bench/decode','bench/grpo_step':'bench','bench/rollout_mix':'bench','by_hand':'api','jobs':'workflow','layers':'models','plan':'workflow','policy':'models','prepare':'workflow','pretrain':'rl','provenance':'host','publishing':'publish','quantization':'models','random_models':'models','trackers':'rl'}.items()}
files={u+'report/test_exploration.py':u+'study/test_verdict.py',u+'report/studies.py':u+'study/studies.py',u+'report/test_gather.py':u+'study/test_gather.py',u+'report/test_study.py':u+'study/test_page.py',u+'results/test_outcomes.py':u+'study/test_outcomes.py',u+'results/test_paired.py':u+'study/test_paired.py',u+'results/test_study.py':u+'study/test_study_data.py',u+'rl/test_divergence.py':u+'study/test_divergence.py',u+'plan/test_study.py':u+'study/test_study_jobs.py',u+'plan/test_exploration.py':u+'study/test_configuration.py',u+'quantization/test_random_error.py':u+'study/test_random_error.py',
 u+'bench/grpo_step/test_step.py':u+'bench/test_steps.py',u+'bench/rollout_mix/test_workload.py':u+'bench/test_workloads.py', u+'publishing/test_cards.py':u+'api/test_cards.py',u+'publishing/test_scores.py':u+'api/test_scores.py',u+'publishing/__init__.py':u+'api/__init__.py',u+'results/test_roofline.py':u+'results/test_roofline.py',
 u+'random_models/test_checkpoint.py':u+'models/test_random_checkpoint.py',u+'random_models/test_published.py':u+'models/test_random_published.py',u+'data/test_countdown.py':u+'data/test_countdown.py'}
layers=['cli','gates','doctor','api','workflow','study','bench','report','evals','memory_model','rl','rollout','trackers','publish','models','kernels','data','results','checkpoints','formats','jobs','host','settings','version']
json.dump({'targets':T,'packages':packages,'rooms':rooms,'data':data,'tests':{'folders':folders,'files':files},'layers':layers,'skip':['results/','docs/results/exploration/','tests/fixtures/']},open(H/'mapping.json','w'),indent=1)
print(len(T),'targets',sum('doc' in s for s in T.values()),'docs')
